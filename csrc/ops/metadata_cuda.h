// What metadata.cpp asks of a CUDA device: launches, and no look at a value. The exceptions wait for the device: a
// count that decides the size of an output (max_segments not given), and PACKATTN_VALIDATE=1, under which the CPU's
// loops run over copies first and refuse what they always refuse. Inputs are contiguous; outputs as in metadata_cpu.h.
#pragma once
#include <tuple>
#include <vector>

#include "../cuda/metadata.h"
#include "metadata_host.h"
#include "stream.h"

namespace packattn::ops::backend {

// Runs body, whose errors are CUDA's, under the op's name.
template <typename Body>
void launched(const char* op, const Place& place, const Body& body) {
  const Scratch scratch(place, cuda::kScanWorkspaceBytes);
  const cuda::Stream stream = current_stream(place);
  named(op, [&] { body(scratch.data(), stream); });
}

// An output of up to `max_segments` segments, or of as many as there are.
// run(capacity, segments): launches with room for `capacity` segments; *segments (device) becomes their number.
// tokens: there are never more segments than that.
template <typename Run>
int64_t run_with_capacity(const char* op, const Place& place, int64_t tokens, std::optional<int64_t> max_segments,
                          const Run& run) {
  if (max_segments) require_capacity(op, 0, *max_segments);
  Tensor segments = place.empty({1}, ScalarType::Int);
  run(max_segments.value_or(tokens), segments.mutable_data_ptr<int32_t>());
  if (max_segments && !validates()) return *max_segments;
  const int64_t count = on_host(segments).const_data_ptr<int32_t>()[0];
  if (!max_segments) return count;
  require_capacity(op, count, *max_segments);
  return *max_segments;
}

// The first entries, in memory of their own size.
inline Tensor first(Tensor& tensor, int64_t count) {
  if (tensor.numel() == count) return tensor;
  return torch::stable::clone(torch::stable::narrow(tensor, 0, 0, count));
}

inline void cu_seqlens_from_lengths(const char* op, const Place& place, const Tensor& lengths, int32_t* cu) {
  if (validates()) {
    std::vector<int32_t> unused(static_cast<size_t>(lengths.numel()) + 1);
    host::cu_seqlens_from_lengths(op, on_host(lengths), unused.data());
  }
  launched(op, place, [&](void* scratch, const cuda::Stream& stream) {
    with_integers(lengths,
                  [&](const auto* data) { cuda::cu_seqlens_from_lengths(data, lengths.numel(), cu, scratch, stream); });
  });
}

inline Tensor cu_seqlens_from_segment_ids(const char* op, const Place& place, const Tensor& ids,
                                          std::optional<int64_t> pad_id, std::optional<int64_t> max_segments) {
  if (validates()) host::cu_seqlens_from_segment_ids(op, on_host(ids), pad_id);
  Tensor cu;
  const int64_t size = run_with_capacity(op, place, ids.numel(), max_segments, [&](int64_t room, int32_t* segments) {
    cu = place.empty({room + 1}, ScalarType::Int);
    launched(op, place, [&](void* scratch, const cuda::Stream& stream) {
      with_token_rows(ids, [&](const auto& rows) {
        cuda::cu_seqlens_from_segment_ids(rows, pad_id, room, cu.mutable_data_ptr<int32_t>(), segments, scratch,
                                          stream);
      });
    });
  });
  return first(cu, size + 1);
}

inline Tensor cu_seqlens_from_position_ids(const char* op, const Place& place, const Tensor& ids, BoundaryRule rule,
                                           std::optional<int64_t> max_segments) {
  if (validates()) host::cu_seqlens_from_position_ids(op, on_host(ids), rule);
  Tensor cu;
  const int64_t size = run_with_capacity(op, place, ids.numel(), max_segments, [&](int64_t room, int32_t* segments) {
    cu = place.empty({room + 1}, ScalarType::Int);
    launched(op, place, [&](void* scratch, const cuda::Stream& stream) {
      with_token_rows(ids, [&](const auto& rows) {
        cuda::cu_seqlens_from_position_ids(rows, rule, room, cu.mutable_data_ptr<int32_t>(), segments, scratch, stream);
      });
    });
  });
  return first(cu, size + 1);
}

inline std::tuple<Tensor, Tensor> documents_from_segment_ids(const char* op, const Place& place, const Tensor& ids,
                                                             std::optional<int64_t> pad_id,
                                                             std::optional<int64_t> max_segments) {
  if (validates()) host::documents_from_segment_ids(op, on_host(ids), pad_id);
  Tensor starts, ends;
  const int64_t size = run_with_capacity(op, place, ids.numel(), max_segments, [&](int64_t room, int32_t* segments) {
    starts = place.empty({room}, ScalarType::Int);
    ends = place.empty({room}, ScalarType::Int);
    launched(op, place, [&](void* scratch, const cuda::Stream& stream) {
      with_token_rows(ids, [&](const auto& rows) {
        cuda::documents_from_segment_ids(rows, pad_id, room, starts.mutable_data_ptr<int32_t>(),
                                         ends.mutable_data_ptr<int32_t>(), segments, scratch, stream);
      });
    });
  });
  return {first(starts, size), first(ends, size)};
}

inline void position_ids_from_cu_seqlens(const char* op, const Place& place, const Tensor& cu_seqlens, int64_t total,
                                         int64_t* out) {
  if (validates()) {
    std::vector<int64_t> unused(static_cast<size_t>(total));
    host::position_ids_from_cu_seqlens(op, on_host(cu_seqlens), total, unused.data());
  }
  const cuda::Stream stream = current_stream(place);
  with_integers(cu_seqlens, [&](const auto* cu) {
    named(op, [&] { cuda::position_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, out, stream); });
  });
}

inline void segment_ids_from_cu_seqlens(const char* op, const Place& place, const Tensor& cu_seqlens, int64_t total,
                                        int32_t* out) {
  if (validates()) {
    std::vector<int32_t> unused(static_cast<size_t>(total));
    host::segment_ids_from_cu_seqlens(op, on_host(cu_seqlens), total, unused.data());
  }
  const cuda::Stream stream = current_stream(place);
  with_integers(cu_seqlens, [&](const auto* cu) {
    named(op, [&] { cuda::segment_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, out, stream); });
  });
}

inline void document_ranges(const char* op, const Place& place, const DocumentTensors& documents, int64_t total_q,
                            const DocumentRanges& out) {
  if (validates()) {
    std::vector<int32_t> unused(static_cast<size_t>(4 * total_q));
    int32_t* data = unused.data();
    const auto& [sq, eq, sk, ek] = documents;
    host::document_ranges(op, {on_host(sq), on_host(eq), on_host(sk), on_host(ek)}, total_q,
                          {data, data + total_q, data + 2 * total_q, data + 3 * total_q});
  }
  const cuda::Stream stream = current_stream(place);
  with_document_pairs(
      documents, [&](const auto& pairs) { named(op, [&] { cuda::document_ranges(pairs, total_q, out, stream); }); });
}

inline void key_ranges(const Place& place, const int32_t* begin, const int32_t* end, const int32_t* diagonal,
                       const int32_t* prefix_end, int64_t rows, const KeyRangeOptions& options, int32_t* key_begin,
                       int32_t* key_end) {
  cuda::key_ranges(begin, end, diagonal, prefix_end, rows, options, key_begin, key_end, current_stream(place));
}

inline void query_ranges(const char* op, const Place& place, const Tensor& key_begin, const Tensor& key_end,
                         int64_t total_k, int32_t* query_begin, int32_t* query_end) {
  if (validates()) {
    std::vector<int32_t> unused(static_cast<size_t>(2 * total_k));
    host::query_ranges(op, on_host(key_begin), on_host(key_end), total_k, unused.data(), unused.data() + total_k);
  }
  const int64_t total_q = key_begin.numel();
  const Scratch scratch(place, cuda::query_ranges_workspace_bytes(total_q, total_k));
  const cuda::Stream stream = current_stream(place);
  named(op, [&] {
    cuda::query_ranges(key_begin.const_data_ptr<int32_t>(), key_end.const_data_ptr<int32_t>(), total_q, total_k,
                       query_begin, query_end, scratch.data(), stream);
  });
}

}  // namespace packattn::ops::backend
