// The host ops of torch.ops.packattn. Schemas, with defaults, are defined in python/packattn/ops.py;
// the order of the parameters here is the schema's.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace packattn::ops {

using torch::stable::Tensor;

// attention.cpp
std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& key_begin, const Tensor& key_end,
                                             const std::optional<Tensor>& sinks, double scale, double softcap);
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& dout, const std::optional<Tensor>& dlse,
                                                              const Tensor& query, const Tensor& key,
                                                              const Tensor& value, const Tensor& out, const Tensor& lse,
                                                              const Tensor& key_begin, const Tensor& key_end,
                                                              const std::optional<Tensor>& sinks, double scale,
                                                              double softcap);

// metadata.cpp
Tensor cu_seqlens_from_lengths(const Tensor& lengths);
Tensor cu_seqlens_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                   std::optional<int64_t> max_segments);
Tensor cu_seqlens_from_position_ids(const Tensor& position_ids, StringHandle rule, std::optional<int64_t> max_segments);
std::tuple<Tensor, Tensor> documents_from_segment_ids(const Tensor& segment_ids, std::optional<int64_t> pad_id,
                                                      std::optional<int64_t> max_segments);
Tensor position_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total);
Tensor segment_ids_from_cu_seqlens(const Tensor& cu_seqlens, int64_t total);
std::tuple<Tensor, Tensor, Tensor, Tensor> document_ranges(const Tensor& starts_q, const Tensor& ends_q,
                                                           const Tensor& starts_k, const Tensor& ends_k,
                                                           int64_t total_q);
std::tuple<Tensor, Tensor> key_ranges(const Tensor& begin, const Tensor& end, const std::optional<Tensor>& diagonal,
                                      const std::optional<Tensor>& prefix_end, bool causal, int64_t window_left,
                                      int64_t window_right, int64_t chunk_size);
std::tuple<Tensor, Tensor> query_ranges(const Tensor& key_begin, const Tensor& key_end, int64_t total_k);

}  // namespace packattn::ops
