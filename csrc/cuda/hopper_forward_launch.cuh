// Which tiles the Hopper forward has at each head dim, and its launch. Included by instantiations/hopper_forward_*.cu.
#pragma once
#include "hopper_forward.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

namespace packattn::cuda {

//              rows  keys  with a soft cap  stages   shared   O + S + P registers, of
//   64,  64     192   128        96           2       88 KB   32 + 64 + 32 = 128   160
//   128, 128    128   128       128           2      160 KB   64 + 64 + 32 = 160   232
//   192, 128    128   128       128           2      208 KB   64 + 64 + 32 = 160   232
//   256, 256    128    80        64           2      224 KB   128 + 40 + 20 = 188  232
//
// A soft cap needs a few registers more, which are not there at 64 and 256. Rows are those of the tile table, built
// before anything is known of a soft cap.
template <int D, int DV, bool SOFTCAP>
struct HopperForwardShapes;
template <bool SOFTCAP>
struct HopperForwardShapes<64, 64, SOFTCAP> : HopperForwardShape<64, 64, 192, SOFTCAP ? 96 : 128, 2> {};
template <bool SOFTCAP>
struct HopperForwardShapes<128, 128, SOFTCAP> : HopperForwardShape<128, 128, 128, 128, 2> {};
template <bool SOFTCAP>
struct HopperForwardShapes<192, 128, SOFTCAP> : HopperForwardShape<192, 128, 128, 128, 2> {};
template <bool SOFTCAP>
struct HopperForwardShapes<256, 256, SOFTCAP> : HopperForwardShape<256, 256, 128, SOFTCAP ? 64 : 80, 2> {};

template <class T, int D, int DV>
struct HopperForwardLaunch {
  static int tile_rows(const Device&) { return HopperForwardShapes<D, DV, false>::kRows; }

  static void run(const ForwardTask& task, const Stream& stream) {
    task.softcap > 0.f ? run_shape<true>(task, stream) : run_shape<false>(task, stream);
  }

  static ForwardKernel kernel() { return {&tile_rows, &run}; }

 private:
  template <bool SOFTCAP>
  static void run_shape(const ForwardTask& task, const Stream& stream) {
    using Shape = HopperForwardShapes<D, DV, SOFTCAP>;
    if (task.total_q == 0) return;
    launch(stream, &hopper_forward_kernel<T, Shape, SOFTCAP>, stream.device.multiprocessors, Shape::kThreads,
           Shape::kSharedBytes,
           tensor_map("query", task.query, task.total_q, task.heads_q, task.head_dim, Shape::kRows),
           tensor_map("key", task.key, task.total_k, task.heads_k, task.head_dim, Shape::kKeys),
           tensor_map("value", task.value, task.total_k, task.heads_k, task.head_dim_v, Shape::kKeys),
           ForwardArguments(task));
  }
};

}  // namespace packattn::cuda
