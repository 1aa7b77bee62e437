// Which tiles the Hopper forward has at each head dim, and its launch. Included by instantiations/hopper_forward_*.cu.
#pragma once
#include <limits>
#include <stdexcept>

#include "hopper_forward.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

namespace packattn::cuda {

//              rows  keys  stages   shared   O + S + P registers, of
//   64,  64     192   128    2       88 KB   32 + 64 + 32 = 128    160
//   128, 128    128   128    2      160 KB   64 + 64 + 32 = 160    240
//   192, 128    128   128    2      208 KB   64 + 64 + 32 = 160    240
//   256, 256    128    80    2      224 KB   128 + 40 + 20 = 188   240
template <int D, int DV>
struct HopperForwardShapes;
template <>
struct HopperForwardShapes<64, 64> : HopperForwardShape<64, 64, 192, 128, 2> {};
template <>
struct HopperForwardShapes<128, 128> : HopperForwardShape<128, 128, 128, 128, 2> {};
template <>
struct HopperForwardShapes<192, 128> : HopperForwardShape<192, 128, 128, 128, 2> {};
template <>
struct HopperForwardShapes<256, 256> : HopperForwardShape<256, 256, 128, 80, 2> {};

template <class T, int D, int DV>
struct HopperForwardLaunch {
  using Shape = HopperForwardShapes<D, DV>;

  static int tile_rows(const Device&) { return Shape::kRows; }

  static void run(const ForwardTask& task, const Stream& stream) {
    // Kernels count keys and rows in int32, and look up to a block past the last.
    if (task.total_k > std::numeric_limits<int32_t>::max() - 4 * Shape::kKeys) {
      throw std::invalid_argument("attention_forward: too many keys for the tensor-core kernels: " +
                                  std::to_string(task.total_k));
    }
    if (task.total_q == 0) return;
    launch(stream,
           task.softcap > 0.f ? &hopper_forward_kernel<T, Shape, true> : &hopper_forward_kernel<T, Shape, false>,
           stream.device.multiprocessors, Shape::kThreads, Shape::kSharedBytes,
           tensor_map("query", task.query, task.total_q, task.heads_q, task.head_dim, Shape::kRows),
           tensor_map("key", task.key, task.total_k, task.heads_k, task.head_dim, Shape::kKeys),
           tensor_map("value", task.value, task.total_k, task.heads_k, task.head_dim_v, Shape::kKeys),
           ForwardArguments(task));
  }

  static ForwardKernel kernel() { return {&tile_rows, &run}; }
};

}  // namespace packattn::cuda
