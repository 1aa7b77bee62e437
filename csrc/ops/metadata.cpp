// Metadata ops: check -> allocate -> run the loops of csrc/cpu/metadata.cpp.
#include "../cpu/metadata.h"

#include <algorithm>
#include <string>
#include <vector>

#include "checks.h"
#include "ops.h"

namespace packattn::ops {
namespace {

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
void with_token_rows(const char* op, const char* name, const Tensor& ids, const Body& body) {
  require_integers(op, name, ids);
  require(ids.dim() != 3, op, name, " is 3-D ", Sizes{ids},
          " (several position planes, as for mRoPE); choose a plane, for instance ", name, "[0]");
  require(ids.dim() == 1 || ids.dim() == 2, op, name, " must be 1-D [T] or 2-D [B, S], got ", Described{ids});
  const int64_t rows = ids.dim() == 2 ? ids.size(0) : 1;
  const int64_t columns = ids.size(ids.dim() - 1);
  with_integers(as_contiguous(ids),
                [&]<typename Index>(const Index* data) { body(cpu::TokenRows<Index>{data, rows, columns}); });
}

// A new int32 tensor with the values, repeated from `fill` up to `size` entries.
Tensor padded(const std::vector<int32_t>& values, int64_t size, int32_t fill) {
  Tensor out = empty_cpu({size}, ScalarType::Int);
  int32_t* data = out.mutable_data_ptr<int32_t>();
  std::fill(std::copy(values.begin(), values.end(), data), data + size, fill);
  return out;
}

// The text behind a `str` argument, which it takes over. TORCH_BOX's own conversion to std::string does not free its
// copy (torch 2.13).
std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// How many entries the output has room for.
int64_t capacity(const char* op, int64_t count, std::optional<int64_t> max_segments) {
  if (!max_segments.has_value()) return count;
  require(*max_segments >= 0, op, "max_segments must be at least 0, got ", *max_segments);
  require(*max_segments < kInt32Max, op, "max_segments must be less than ", kInt32Max, ", got ", *max_segments);
  require(*max_segments >= count, op, "max_segments must be at least the number of segments, ", count, ", got ",
          *max_segments);
  return *max_segments;
}

Tensor padded_cu_seqlens(const char* op, const std::vector<int32_t>& cu, std::optional<int64_t> max_segments) {
  const int64_t count = static_cast<int64_t>(cu.size()) - 1;
  return padded(cu, capacity(op, count, max_segments) + 1, cu.back());
}

void require_total(const char* op, const char* name, int64_t total) {
  require(total >= 0 && total <= kInt32Max, op, name, " must be in [0, ", kInt32Max, "], got ", total);
}

}  // namespace

Tensor cu_seqlens_from_lengths(const Tensor& lengths) {
  const char* op = "cu_seqlens_from_lengths";
  require_integers(op, "lengths", lengths);
  const int64_t count = lengths.numel();
  require(count < kInt32Max, op, "lengths must have less than ", kInt32Max, " entries, got ", Described{lengths});
  Tensor cu = empty_cpu({count + 1}, ScalarType::Int);
  with_integers(as_contiguous(lengths), [&](const auto* data) {
    named(op, [&] { cpu::cu_seqlens_from_lengths(data, count, cu.mutable_data_ptr<int32_t>()); });
  });
  return cu;
}

Tensor cu_seqlens_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                   std::optional<int64_t> max_segments) {
  const char* op = "cu_seqlens_from_segment_ids";
  std::vector<int32_t> cu;
  with_token_rows(op, "segment_ids", segment_ids,
                  [&](const auto& ids) { named(op, [&] { cu = cpu::cu_seqlens_from_segment_ids(ids, pad_id); }); });
  return padded_cu_seqlens(op, cu, max_segments);
}

Tensor cu_seqlens_from_position_ids(const Tensor& position_ids, StringHandle rule,
                                    std::optional<int64_t> max_segments) {
  const char* op = "cu_seqlens_from_position_ids";
  const std::string rule_name = take_string(rule);
  require(rule_name == "step" || rule_name == "zero", op, "rule must be \"step\" or \"zero\", got '", rule_name, "'");
  const cpu::BoundaryRule boundary = rule_name == "step" ? cpu::BoundaryRule::step : cpu::BoundaryRule::zero;
  std::vector<int32_t> cu;
  with_token_rows(op, "position_ids", position_ids,
                  [&](const auto& ids) { named(op, [&] { cu = cpu::cu_seqlens_from_position_ids(ids, boundary); }); });
  return padded_cu_seqlens(op, cu, max_segments);
}

std::tuple<Tensor, Tensor> documents_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                                      std::optional<int64_t> max_segments) {
  const char* op = "documents_from_segment_ids";
  cpu::Documents documents;
  with_token_rows(op, "segment_ids", segment_ids, [&](const auto& ids) {
    named(op, [&] { documents = cpu::documents_from_segment_ids(ids, pad_id); });
  });
  const int64_t size = capacity(op, static_cast<int64_t>(documents.starts.size()), max_segments);
  const int32_t last = documents.ends.empty() ? 0 : documents.ends.back();
  return {padded(documents.starts, size, last), padded(documents.ends, size, last)};
}

Tensor position_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total) {
  const char* op = "position_ids_from_cu_seqlens";
  require_integer_vector(op, "cu_seqlens", cu_seqlens, "[N + 1]");
  require_total(op, "total", total);
  Tensor position_ids = empty_cpu({total}, ScalarType::Long);
  with_integers(as_contiguous(cu_seqlens), [&](const auto* cu) {
    named(op, [&] {
      cpu::position_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, position_ids.mutable_data_ptr<int64_t>());
    });
  });
  return position_ids;
}

Tensor segment_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total) {
  const char* op = "segment_ids_from_cu_seqlens";
  require_integer_vector(op, "cu_seqlens", cu_seqlens, "[N + 1]");
  require_total(op, "total", total);
  Tensor segment_ids = empty_cpu({total}, ScalarType::Int);
  with_integers(as_contiguous(cu_seqlens), [&](const auto* cu) {
    named(op, [&] {
      cpu::segment_ids_from_cu_seqlens(cu, cu_seqlens.numel(), total, segment_ids.mutable_data_ptr<int32_t>());
    });
  });
  return segment_ids;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> document_ranges(const Tensor& starts_q, const Tensor& ends_q,
                                                           const Tensor& starts_k, const Tensor& ends_k,
                                                           int64_t total_q) {
  const char* op = "document_ranges";
  require_integer_vector(op, "starts_q", starts_q, "[N], one entry per document");
  require_integer_vector(op, "ends_q", ends_q, "[N], one entry per document");
  require_integer_vector(op, "starts_k", starts_k, "[N], one entry per document");
  require_integer_vector(op, "ends_k", ends_k, "[N], one entry per document");
  const int64_t count = starts_q.numel();
  require(ends_q.numel() == count, op, "ends_q must be as long as starts_q (", count, "), got ", Described{ends_q});
  require(ends_k.numel() == starts_k.numel(), op, "ends_k must be as long as starts_k (", starts_k.numel(), "), got ",
          Described{ends_k});
  require(starts_k.numel() == count, op, "q and k must hold the same number of documents, got ", count, " and ",
          starts_k.numel());
  require_total(op, "total_q", total_q);

  Tensor begin = empty_cpu({total_q}, ScalarType::Int);
  Tensor end = empty_cpu({total_q}, ScalarType::Int);
  Tensor diagonal = empty_cpu({total_q}, ScalarType::Int);
  Tensor segment_ids = empty_cpu({total_q}, ScalarType::Int);
  const cpu::DocumentRanges out{begin.mutable_data_ptr<int32_t>(), end.mutable_data_ptr<int32_t>(),
                                diagonal.mutable_data_ptr<int32_t>(), segment_ids.mutable_data_ptr<int32_t>()};
  const Tensor inputs[] = {as_contiguous(starts_q), as_contiguous(ends_q), as_contiguous(starts_k),
                           as_contiguous(ends_k)};
  const bool narrow = std::all_of(std::begin(inputs), std::end(inputs),
                                  [](const Tensor& input) { return input.scalar_type() == ScalarType::Int; });
  const auto run = [&]<typename Index>(const Tensor& sq, const Tensor& eq, const Tensor& sk, const Tensor& ek, Index) {
    const cpu::DocumentPairs<Index> pairs{count, sq.const_data_ptr<Index>(), eq.const_data_ptr<Index>(),
                                          sk.const_data_ptr<Index>(), ek.const_data_ptr<Index>()};
    named(op, [&] { cpu::document_ranges(pairs, total_q, out); });
  };
  if (narrow) {
    run(inputs[0], inputs[1], inputs[2], inputs[3], int32_t{});
  } else {
    const auto wide = [](const Tensor& input) { return torch::stable::to(input, ScalarType::Long); };
    run(wide(inputs[0]), wide(inputs[1]), wide(inputs[2]), wide(inputs[3]), int64_t{});
  }
  return {begin, end, diagonal, segment_ids};
}

std::tuple<Tensor, Tensor> key_ranges(const Tensor& begin, const Tensor& end, const std::optional<Tensor>& diagonal,
                                      const std::optional<Tensor>& prefix_end, bool causal, int64_t window_left,
                                      int64_t window_right, int64_t chunk_size) {
  const char* op = "key_ranges";
  require_cpu(op, "begin", begin);
  require(begin.scalar_type() == ScalarType::Int && begin.dim() == 1, op, "begin must be int32 [T], got ",
          Described{begin});
  const int64_t rows = begin.numel();
  require_tensor(op, "end", end, ScalarType::Int, "[T]", {rows});
  if (diagonal) require_tensor(op, "diagonal", *diagonal, ScalarType::Int, "[T]", {rows});
  if (prefix_end) require_tensor(op, "prefix_end", *prefix_end, ScalarType::Int, "[T]", {rows});
  require(window_left >= -1, op, "window_left must be at least -1 (-1: no limit), got ", window_left);
  require(window_right >= -1, op, "window_right must be at least -1 (-1: no limit), got ", window_right);
  require(chunk_size >= 0, op, "chunk_size must be at least 0 (0: no chunks), got ", chunk_size);

  const Tensor first = as_contiguous(begin);
  const Tensor last = as_contiguous(end);
  const std::optional<Tensor> center = diagonal ? std::optional(as_contiguous(*diagonal)) : std::nullopt;
  const std::optional<Tensor> prefix = prefix_end ? std::optional(as_contiguous(*prefix_end)) : std::nullopt;
  Tensor key_begin = empty_cpu({rows}, ScalarType::Int);
  Tensor key_end = empty_cpu({rows}, ScalarType::Int);
  const cpu::KeyRangeOptions options{causal, window_left, window_right, chunk_size};
  cpu::key_ranges(first.const_data_ptr<int32_t>(), last.const_data_ptr<int32_t>(),
                  center ? center->const_data_ptr<int32_t>() : nullptr,
                  prefix ? prefix->const_data_ptr<int32_t>() : nullptr, rows, options,
                  key_begin.mutable_data_ptr<int32_t>(), key_end.mutable_data_ptr<int32_t>());
  return {key_begin, key_end};
}

std::tuple<Tensor, Tensor> query_ranges(const Tensor& key_begin, const Tensor& key_end, int64_t total_k) {
  const char* op = "query_ranges";
  require_cpu(op, "key_begin", key_begin);
  require(key_begin.scalar_type() == ScalarType::Int && key_begin.dim() == 1, op,
          "key_begin must be int32 [total_q], got ", Described{key_begin});
  const int64_t rows = key_begin.numel();
  require_tensor(op, "key_end", key_end, ScalarType::Int, "[total_q]", {rows});
  require(rows <= kInt32Max, op, "key_begin must have at most ", kInt32Max, " rows, got ", Described{key_begin});
  require_total(op, "total_k", total_k);
  const Tensor begin = as_contiguous(key_begin);
  const Tensor end = as_contiguous(key_end);
  Tensor query_begin = empty_cpu({total_k}, ScalarType::Int);
  Tensor query_end = empty_cpu({total_k}, ScalarType::Int);
  named(op, [&] {
    cpu::query_ranges(begin.const_data_ptr<int32_t>(), end.const_data_ptr<int32_t>(), rows, total_k,
                      query_begin.mutable_data_ptr<int32_t>(), query_end.mutable_data_ptr<int32_t>());
  });
  return {query_begin, query_end};
}

}  // namespace packattn::ops
