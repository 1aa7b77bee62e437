// Metadata ops: check -> allocate -> run. Every device shares the ops; what runs is in metadata_cpu.h and
// metadata_cuda.h.
#include <string>

#include "checks.h"
#include "ops.h"
#if defined(PACKATTN_BACKEND_CPU)
#include "metadata_cpu.h"
#else
#include "metadata_cuda.h"
#endif

namespace packattn::ops {
namespace {

// Token ids, [T] or [B, S].
void require_ids(const char* op, const char* name, const Tensor& ids) {
  require_integers(op, name, ids);
  require(ids.dim() != 3, op, name, " is 3-D ", Sizes{ids},
          " (several position planes, as for mRoPE); choose a plane, for instance ", name, "[0]");
  require(ids.dim() == 1 || ids.dim() == 2, op, name, " must be 1-D [T] or 2-D [B, S], got ", Described{ids});
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

void require_total(const char* op, const char* name, int64_t total) {
  require(total >= 0 && total <= kInt32Max, op, name, " must be in [0, ", kInt32Max, "], got ", total);
}

}  // namespace

Tensor cu_seqlens_from_lengths(const Tensor& lengths) {
  const char* op = "cu_seqlens_from_lengths";
  require_integers(op, "lengths", lengths);
  const int64_t count = lengths.numel();
  require(count < kInt32Max, op, "lengths must have less than ", kInt32Max, " entries, got ", Described{lengths});
  const Place place(lengths);
  Tensor cu = place.empty({count + 1}, ScalarType::Int);
  backend::cu_seqlens_from_lengths(op, place, as_contiguous(lengths), cu.mutable_data_ptr<int32_t>());
  return cu;
}

Tensor cu_seqlens_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                   std::optional<int64_t> max_segments) {
  const char* op = "cu_seqlens_from_segment_ids";
  require_ids(op, "segment_ids", segment_ids);
  return backend::cu_seqlens_from_segment_ids(op, Place(segment_ids), as_contiguous(segment_ids), pad_id, max_segments);
}

Tensor cu_seqlens_from_position_ids(const Tensor& position_ids, StringHandle rule,
                                    std::optional<int64_t> max_segments) {
  const char* op = "cu_seqlens_from_position_ids";
  const std::string rule_name = take_string(rule);
  require(rule_name == "step" || rule_name == "zero", op, "rule must be \"step\" or \"zero\", got '", rule_name, "'");
  require_ids(op, "position_ids", position_ids);
  return backend::cu_seqlens_from_position_ids(op, Place(position_ids), as_contiguous(position_ids),
                                               rule_name == "step" ? BoundaryRule::step : BoundaryRule::zero,
                                               max_segments);
}

std::tuple<Tensor, Tensor> documents_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                                      std::optional<int64_t> max_segments) {
  const char* op = "documents_from_segment_ids";
  require_ids(op, "segment_ids", segment_ids);
  return backend::documents_from_segment_ids(op, Place(segment_ids), as_contiguous(segment_ids), pad_id, max_segments);
}

Tensor position_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total) {
  const char* op = "position_ids_from_cu_seqlens";
  require_integer_vector(op, "cu_seqlens", cu_seqlens, "[N + 1]");
  require_total(op, "total", total);
  const Place place(cu_seqlens);
  Tensor position_ids = place.empty({total}, ScalarType::Long);
  backend::position_ids_from_cu_seqlens(op, place, as_contiguous(cu_seqlens), total,
                                        position_ids.mutable_data_ptr<int64_t>());
  return position_ids;
}

Tensor segment_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total) {
  const char* op = "segment_ids_from_cu_seqlens";
  require_integer_vector(op, "cu_seqlens", cu_seqlens, "[N + 1]");
  require_total(op, "total", total);
  const Place place(cu_seqlens);
  Tensor segment_ids = place.empty({total}, ScalarType::Int);
  backend::segment_ids_from_cu_seqlens(op, place, as_contiguous(cu_seqlens), total,
                                       segment_ids.mutable_data_ptr<int32_t>());
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

  require_one_device(op, {{"starts_q", &starts_q}, {"ends_q", &ends_q}, {"starts_k", &starts_k}, {"ends_k", &ends_k}});

  const Place place(starts_q);
  Tensor begin = place.empty({total_q}, ScalarType::Int);
  Tensor end = place.empty({total_q}, ScalarType::Int);
  Tensor diagonal = place.empty({total_q}, ScalarType::Int);
  Tensor segment_ids = place.empty({total_q}, ScalarType::Int);
  backend::document_ranges(
      op, place, {as_contiguous(starts_q), as_contiguous(ends_q), as_contiguous(starts_k), as_contiguous(ends_k)},
      total_q,
      {begin.mutable_data_ptr<int32_t>(), end.mutable_data_ptr<int32_t>(), diagonal.mutable_data_ptr<int32_t>(),
       segment_ids.mutable_data_ptr<int32_t>()});
  return {begin, end, diagonal, segment_ids};
}

std::tuple<Tensor, Tensor> key_ranges(const Tensor& begin, const Tensor& end, const std::optional<Tensor>& diagonal,
                                      const std::optional<Tensor>& prefix_end, bool causal, int64_t window_left,
                                      int64_t window_right, int64_t chunk_size) {
  const char* op = "key_ranges";
  require_device(op, "begin", begin);
  require(begin.scalar_type() == ScalarType::Int && begin.dim() == 1, op, "begin must be int32 [T], got ",
          Described{begin});
  const int64_t rows = begin.numel();
  require_tensor(op, "end", end, ScalarType::Int, "[T]", {rows});
  if (diagonal) require_tensor(op, "diagonal", *diagonal, ScalarType::Int, "[T]", {rows});
  if (prefix_end) require_tensor(op, "prefix_end", *prefix_end, ScalarType::Int, "[T]", {rows});
  require(window_left >= -1, op, "window_left must be at least -1 (-1: no limit), got ", window_left);
  require(window_right >= -1, op, "window_right must be at least -1 (-1: no limit), got ", window_right);
  require(chunk_size >= 0, op, "chunk_size must be at least 0 (0: no chunks), got ", chunk_size);

  require_one_device(op, {{"begin", &begin},
                          {"end", &end},
                          {"diagonal", diagonal ? &*diagonal : nullptr},
                          {"prefix_end", prefix_end ? &*prefix_end : nullptr}});

  const Tensor first = as_contiguous(begin);
  const Tensor last = as_contiguous(end);
  const std::optional<Tensor> center = diagonal ? std::optional(as_contiguous(*diagonal)) : std::nullopt;
  const std::optional<Tensor> prefix = prefix_end ? std::optional(as_contiguous(*prefix_end)) : std::nullopt;
  const Place place(begin);
  Tensor key_begin = place.empty({rows}, ScalarType::Int);
  Tensor key_end = place.empty({rows}, ScalarType::Int);
  const KeyRangeOptions options{causal, window_left, window_right, chunk_size};
  named(op, [&] {
    backend::key_ranges(place, first.const_data_ptr<int32_t>(), last.const_data_ptr<int32_t>(),
                        center ? center->const_data_ptr<int32_t>() : nullptr,
                        prefix ? prefix->const_data_ptr<int32_t>() : nullptr, rows, options,
                        key_begin.mutable_data_ptr<int32_t>(), key_end.mutable_data_ptr<int32_t>());
  });
  return {key_begin, key_end};
}

std::tuple<Tensor, Tensor> query_ranges(const Tensor& key_begin, const Tensor& key_end, int64_t total_k) {
  const char* op = "query_ranges";
  require_device(op, "key_begin", key_begin);
  require(key_begin.scalar_type() == ScalarType::Int && key_begin.dim() == 1, op,
          "key_begin must be int32 [total_q], got ", Described{key_begin});
  const int64_t rows = key_begin.numel();
  require_tensor(op, "key_end", key_end, ScalarType::Int, "[total_q]", {rows});
  require(rows <= kInt32Max, op, "key_begin must have at most ", kInt32Max, " rows, got ", Described{key_begin});
  require_total(op, "total_k", total_k);
  require_one_device(op, {{"key_begin", &key_begin}, {"key_end", &key_end}});
  const Place place(key_begin);
  Tensor query_begin = place.empty({total_k}, ScalarType::Int);
  Tensor query_end = place.empty({total_k}, ScalarType::Int);
  backend::query_ranges(op, place, as_contiguous(key_begin), as_contiguous(key_end), total_k,
                        query_begin.mutable_data_ptr<int32_t>(), query_end.mutable_data_ptr<int32_t>());
  return {query_begin, query_end};
}

}  // namespace packattn::ops
