// The loops of csrc/cpu/metadata.h over tensors in host memory. They are the CPU's ops, and under PACKATTN_VALIDATE
// what looks at the values of other devices: they refuse what is wrong, with the op's name.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../cpu/metadata.h"
#include "checks.h"

namespace packattn::ops {

// Calls body with the data of an int32 or int64 tensor, which must be contiguous.
template <typename Body>
void with_integers(const Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == ScalarType::Int) {
    body(tensor.const_data_ptr<int32_t>());
  } else {
    body(tensor.const_data_ptr<int64_t>());
  }
}

// As with_integers for token ids [T] or [B, S].
template <typename Body>
void with_token_rows(const Tensor& ids, const Body& body) {
  const int64_t rows = ids.dim() == 2 ? ids.size(0) : 1;
  const int64_t columns = ids.size(ids.dim() - 1);
  with_integers(ids, [&]<typename Index>(const Index* data) { body(TokenRows<Index>{data, rows, columns}); });
}

// Calls body with the starts and ends of documents of two token axes, int32 if all four are, else int64.
struct DocumentTensors {
  Tensor starts_q, ends_q, starts_k, ends_k;  // contiguous, int32 or int64 [N]
};

template <typename Body>
void with_document_pairs(const DocumentTensors& documents, const Body& body) {
  const auto& [sq, eq, sk, ek] = documents;
  const auto is_narrow = [](const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Int; };
  const auto run = [&]<typename Index>(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, Index) {
    body(DocumentPairs<Index>{a.numel(), a.const_data_ptr<Index>(), b.const_data_ptr<Index>(),
                              c.const_data_ptr<Index>(), d.const_data_ptr<Index>()});
  };
  if (is_narrow(sq) && is_narrow(eq) && is_narrow(sk) && is_narrow(ek)) {
    run(sq, eq, sk, ek, int32_t{});
  } else {
    const auto wide = [](const Tensor& tensor) { return torch::stable::to(tensor, ScalarType::Long); };
    run(wide(sq), wide(eq), wide(sk), wide(ek), int64_t{});
  }
}

namespace host {

inline void cu_seqlens_from_lengths(const char* op, const Tensor& lengths, int32_t* cu) {
  with_integers(lengths,
                [&](const auto* data) { named(op, [&] { cpu::cu_seqlens_from_lengths(data, lengths.numel(), cu); }); });
}

inline std::vector<int32_t> cu_seqlens_from_segment_ids(const char* op, const Tensor& segment_ids,
                                                        std::optional<int64_t> pad_id) {
  std::vector<int32_t> cu;
  with_token_rows(segment_ids,
                  [&](const auto& ids) { named(op, [&] { cu = cpu::cu_seqlens_from_segment_ids(ids, pad_id); }); });
  return cu;
}

inline std::vector<int32_t> cu_seqlens_from_position_ids(const char* op, const Tensor& position_ids,
                                                         BoundaryRule rule) {
  std::vector<int32_t> cu;
  with_token_rows(position_ids,
                  [&](const auto& ids) { named(op, [&] { cu = cpu::cu_seqlens_from_position_ids(ids, rule); }); });
  return cu;
}

inline cpu::Documents documents_from_segment_ids(const char* op, const Tensor& segment_ids,
                                                 std::optional<int64_t> pad_id) {
  cpu::Documents documents;
  with_token_rows(segment_ids, [&](const auto& ids) {
    named(op, [&] { documents = cpu::documents_from_segment_ids(ids, pad_id); });
  });
  return documents;
}

inline void position_ids_from_cu_seqlens(const char* op, const Tensor& cu_seqlens, int64_t total, int64_t* out) {
  with_integers(cu_seqlens, [&](const auto* cu) {
    named(op, [&] { cpu::position_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, out); });
  });
}

inline void segment_ids_from_cu_seqlens(const char* op, const Tensor& cu_seqlens, int64_t total, int32_t* out) {
  with_integers(cu_seqlens, [&](const auto* cu) {
    named(op, [&] { cpu::segment_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, out); });
  });
}

inline void document_ranges(const char* op, const DocumentTensors& documents, int64_t total_q,
                            const DocumentRanges& out) {
  with_document_pairs(documents,
                      [&](const auto& pairs) { named(op, [&] { cpu::document_ranges(pairs, total_q, out); }); });
}

inline void query_ranges(const char* op, const Tensor& key_begin, const Tensor& key_end, int64_t total_k,
                         int32_t* query_begin, int32_t* query_end) {
  named(op, [&] {
    cpu::query_ranges(key_begin.const_data_ptr<int32_t>(), key_end.const_data_ptr<int32_t>(), key_begin.numel(),
                      total_k, query_begin, query_end);
  });
}

}  // namespace host
}  // namespace packattn::ops
