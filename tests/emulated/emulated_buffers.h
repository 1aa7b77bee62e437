// Tells the emulator which memory an attention op may touch: its tensors, row by row as far as they reach, and its
// scratch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "common/params.h"
#include "cuda/launch.cuh"

namespace packattn::ops {

// Registers while it lives, and keeps other ops out: the emulator's list of buffers is one for the process.
class EmulatedBuffers {
 public:
  EmulatedBuffers(const AttentionForwardParams& p, void* scratch, size_t bytes) : lock_(cuda::emulator_mutex()) {
    add_forward(p, scratch, bytes);
    announce();
  }

  EmulatedBuffers(const AttentionBackwardParams& p, void* scratch, size_t bytes) : lock_(cuda::emulator_mutex()) {
    add_forward(p, scratch, bytes);
    add(p, p.dout, p.total_q, p.heads_q, p.head_dim_v);
    add(p.dlse, rows(p));
    add(p, p.dquery, p.total_q, p.heads_q, p.head_dim);
    add(p, p.dkey, p.total_k, p.heads_k, p.head_dim);
    add(p, p.dvalue, p.total_k, p.heads_k, p.head_dim_v);
    add(p.dsinks, p.heads_q);
    announce();
  }

  ~EmulatedBuffers() {
    for (const auto& [begin, end] : merged_) emu::forget_buffer(reinterpret_cast<void*>(begin));
  }
  EmulatedBuffers(const EmulatedBuffers&) = delete;
  EmulatedBuffers& operator=(const EmulatedBuffers&) = delete;

 private:
  static int64_t rows(const AttentionForwardParams& p) { return p.total_q * p.heads_q; }

  void add_forward(const AttentionForwardParams& p, void* scratch, size_t bytes) {
    add(p, p.query, p.total_q, p.heads_q, p.head_dim);
    add(p, p.key, p.total_k, p.heads_k, p.head_dim);
    add(p, p.value, p.total_k, p.heads_k, p.head_dim_v);
    add(p, p.out, p.total_q, p.heads_q, p.head_dim_v);
    add(p.key_begin, p.total_q);
    add(p.key_end, p.total_q);
    add(p.sinks, p.heads_q);
    add(p.lse, rows(p));
    add(static_cast<char*>(scratch), static_cast<int64_t>(bytes));
  }

  void add(const AttentionForwardParams& p, const TensorView& view, int64_t tokens, int64_t heads, int64_t dim) {
    if (tokens == 0) return;
    const int64_t element = p.dtype == DType::float32 ? 4 : 2;
    // Strides may be negative in no tensor of torch.
    add(static_cast<char*>(view.data),
        ((tokens - 1) * view.row_stride + (heads - 1) * view.head_stride + dim) * element);
  }

  template <typename T>
  void add(const T* data, int64_t count) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (data != nullptr && count > 0) ranges_.emplace_back(begin, begin + static_cast<size_t>(count) * sizeof(T));
  }

  // Tensors may share memory (one fused projection, expanded heads), and the emulator's buffers may not overlap.
  void announce() {
    std::sort(ranges_.begin(), ranges_.end());
    for (const auto& [begin, end] : ranges_) {
      if (!merged_.empty() && begin < merged_.back().second) {
        merged_.back().second = std::max(merged_.back().second, end);
      } else {
        merged_.emplace_back(begin, end);
      }
    }
    for (const auto& [begin, end] : merged_) emu::register_buffer(reinterpret_cast<void*>(begin), end - begin);
  }

  std::lock_guard<std::recursive_mutex> lock_;
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges_, merged_;
};

}  // namespace packattn::ops
