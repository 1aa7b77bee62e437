// What metadata.cpp asks of the CPU. Inputs are contiguous; the outputs are allocated where their sizes do not depend
// on values.
#pragma once
#include <algorithm>
#include <tuple>
#include <vector>

#include "metadata_host.h"

namespace packattn::ops::backend {

// A new int32 tensor with the values, repeated from `fill` up to `size` entries.
inline Tensor padded(const Place& place, const std::vector<int32_t>& values, int64_t size, int32_t fill) {
  Tensor out = place.empty({size}, ScalarType::Int);
  int32_t* data = out.mutable_data_ptr<int32_t>();
  std::fill(std::copy(values.begin(), values.end(), data), data + size, fill);
  return out;
}

// How many entries the output has room for.
inline int64_t capacity(const char* op, int64_t count, std::optional<int64_t> max_segments) {
  if (!max_segments.has_value()) return count;
  require_capacity(op, count, *max_segments);
  return *max_segments;
}

inline Tensor padded_cu_seqlens(const char* op, const Place& place, const std::vector<int32_t>& cu,
                                std::optional<int64_t> max_segments) {
  const int64_t count = static_cast<int64_t>(cu.size()) - 1;
  return padded(place, cu, capacity(op, count, max_segments) + 1, cu.back());
}

inline void cu_seqlens_from_lengths(const char* op, const Place&, const Tensor& lengths, int32_t* cu) {
  host::cu_seqlens_from_lengths(op, lengths, cu);
}

inline Tensor cu_seqlens_from_segment_ids(const char* op, const Place& place, const Tensor& ids,
                                          std::optional<int64_t> pad_id, std::optional<int64_t> max_segments) {
  return padded_cu_seqlens(op, place, host::cu_seqlens_from_segment_ids(op, ids, pad_id), max_segments);
}

inline Tensor cu_seqlens_from_position_ids(const char* op, const Place& place, const Tensor& ids, BoundaryRule rule,
                                           std::optional<int64_t> max_segments) {
  return padded_cu_seqlens(op, place, host::cu_seqlens_from_position_ids(op, ids, rule), max_segments);
}

inline std::tuple<Tensor, Tensor> documents_from_segment_ids(const char* op, const Place& place, const Tensor& ids,
                                                             std::optional<int64_t> pad_id,
                                                             std::optional<int64_t> max_segments) {
  const cpu::Documents documents = host::documents_from_segment_ids(op, ids, pad_id);
  const int64_t size = capacity(op, static_cast<int64_t>(documents.starts.size()), max_segments);
  const int32_t last = documents.ends.empty() ? 0 : documents.ends.back();
  return {padded(place, documents.starts, size, last), padded(place, documents.ends, size, last)};
}

inline void position_ids_from_cu_seqlens(const char* op, const Place&, const Tensor& cu, int64_t total, int64_t* out) {
  host::position_ids_from_cu_seqlens(op, cu, total, out);
}

inline void segment_ids_from_cu_seqlens(const char* op, const Place&, const Tensor& cu, int64_t total, int32_t* out) {
  host::segment_ids_from_cu_seqlens(op, cu, total, out);
}

inline void document_ranges(const char* op, const Place&, const DocumentTensors& documents, int64_t total_q,
                            const DocumentRanges& out) {
  host::document_ranges(op, documents, total_q, out);
}

inline void key_ranges(const Place&, const int32_t* begin, const int32_t* end, const int32_t* diagonal,
                       const int32_t* prefix_end, int64_t rows, const KeyRangeOptions& options, int32_t* key_begin,
                       int32_t* key_end) {
  cpu::key_ranges(begin, end, diagonal, prefix_end, rows, options, key_begin, key_end);
}

inline void query_ranges(const char* op, const Place&, const Tensor& key_begin, const Tensor& key_end, int64_t total_k,
                         int32_t* query_begin, int32_t* query_end) {
  host::query_ranges(op, key_begin, key_end, total_k, query_begin, query_end);
}

}  // namespace packattn::ops::backend
