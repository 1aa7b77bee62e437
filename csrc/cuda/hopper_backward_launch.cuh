// Which tiles the Hopper backward has at each head dim, and its launches. Included by
// instantiations/hopper_backward_*.cu.
#pragma once
#include "attention_backward_launch.cuh"
#include "hopper_backward_keys.cuh"
#include "hopper_backward_query.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

namespace packattn::cuda {

//              keys  rows  stages   shared   dK + dV + S^T + dP^T + operand registers, of 240 (64: 232)
//   64,  64     128   112     4      149 KB    32 +  32 + 56 + 56 + 28 = 204
//   128, 128    128    64     4      195 KB    64 +  64 + 32 + 32 + 16 = 208
//   192, 128    128    48     4      203 KB    96 +  64 + 24 + 24 + 12 = 220    with a soft cap 32 rows
//   256, 256    128    64     2      194 KB         128 + 32      + 16 = 176    dV
//               128    48     2      226 KB   128       + 24 + 24 + 12 = 188    dK
template <int D, int DV, int PASS, bool SOFTCAP>
struct HopperBackwardKeyShapes;
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<64, 64, 0, SOFTCAP> : HopperBackwardKeyShape<64, 64, 2, 112, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<128, 128, 0, SOFTCAP> : HopperBackwardKeyShape<128, 128, 2, 64, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<192, 128, 0, SOFTCAP> : HopperBackwardKeyShape<192, 128, 2, SOFTCAP ? 32 : 48, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<256, 256, 1, SOFTCAP> : HopperBackwardKeyShape<256, 256, 2, 64, 2, 1> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<256, 256, 2, SOFTCAP> : HopperBackwardKeyShape<256, 256, 2, 48, 2, 2> {};

template <class T, int D, int DV>
struct HopperBackwardLaunch {
  static int query_rows(const Device&) { return HopperBackwardQueryShapes<T, D, DV, false>::kRows; }
  static int key_rows(const Device&) { return HopperBackwardKeyShapes<D, DV, kFirstPass, false>::kKeys; }

  static void run(const BackwardTask& task, const Stream& stream) {
    run_statistics<T>(task, stream);
    task.softcap > 0.f ? run_shapes<true>(task, stream) : run_shapes<false>(task, stream);
  }

  static BackwardKernel kernel() { return {&query_rows, &key_rows, &statistics_bytes, &run}; }

 private:
  static constexpr int kFirstPass = D == 256 ? 1 : 0;

  template <bool SOFTCAP>
  static void run_shapes(const BackwardTask& task, const Stream& stream) {
    run_keys<HopperBackwardKeyShapes<D, DV, kFirstPass, SOFTCAP>, SOFTCAP>(task, stream);
    if constexpr (kFirstPass == 1) run_keys<HopperBackwardKeyShapes<D, DV, 2, SOFTCAP>, SOFTCAP>(task, stream);
    using Shape = HopperBackwardQueryShapes<T, D, DV, SOFTCAP>;
    run_kernel<Shape>(&hopper_backward_query<T, Shape, SOFTCAP>, task, stream);
  }

  template <class Shape, bool SOFTCAP>
  static void run_keys(const BackwardTask& task, const Stream& stream) {
    run_kernel<Shape>(&hopper_backward_keys<T, Shape, SOFTCAP>, task, stream);
  }

  template <class Shape, class Kernel>
  static void run_kernel(Kernel kernel, const BackwardTask& task, const Stream& stream) {
    launch(stream, kernel, stream.device.multiprocessors, Shape::kThreads, Shape::kSharedBytes,
           tensor_map("query", task.query, task.total_q, task.heads_q, task.head_dim, Shape::kRows),
           tensor_map("dout", task.dout, task.total_q, task.heads_q, task.head_dim_v, Shape::kRows),
           tensor_map("key", task.key, task.total_k, task.heads_k, task.head_dim, Shape::kKeys),
           tensor_map("value", task.value, task.total_k, task.heads_k, task.head_dim_v, Shape::kKeys), task);
  }
};

}  // namespace packattn::cuda
