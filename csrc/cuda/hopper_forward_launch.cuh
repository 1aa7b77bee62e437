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

// Of documents of few rows: 64 rows of a tile, 256 threads.
//
//             keys  stages  blocks   shared   O + S + P registers, of (copier)
//   64,  64     64    2       3       40 KB   32 + 32 + 16 =  80   128 (32)
//   128, 128    64    2       2       80 KB   64 + 32 + 16 = 112   216 (40)
//   192, 128    64    2       2      104 KB   64 + 32 + 16 = 112   216 (40)
//   256, 256    32    2       2       96 KB   128 + 16 + 8 = 152   216 (40)
template <int D, int DV>
struct HopperForwardFewShapes : HopperForwardShape<D, DV, 64, 64, 2, 2> {};
template <>
struct HopperForwardFewShapes<64, 64> : HopperForwardShape<64, 64, 64, 64, 2, 3> {};
template <>
struct HopperForwardFewShapes<256, 256> : HopperForwardShape<256, 256, 64, 32, 2, 2> {};

// log2 of the query heads that share a tile of few rows: the most that divide a key head's, up to 16. With more, tiles
// would be so many that the table outweighs what they save, and lse would be stored in pieces below 16 bytes.
inline int few_rows_stack(const AttentionForwardParams& params) {
  const int group = params.heads_q / params.heads_k;
  int stack = 0;
  while (stack < 4 && group % (2 << stack) == 0) ++stack;
  return stack;
}

template <class T, int D, int DV>
struct HopperForwardLaunch {
  static int tile_rows(const Device&) { return HopperForwardShapes<D, DV, false>::kRows; }
  static int few_tile_rows(const AttentionForwardParams& params) { return kFewRows >> few_rows_stack(params); }

  static void run(const ForwardTask& task, const Stream& stream) {
    task.softcap > 0.f ? run_shapes<true>(task, stream) : run_shapes<false>(task, stream);
  }

  static ForwardKernel kernel() { return {&tile_rows, &run, &few_tile_rows}; }

 private:
  template <bool SOFTCAP>
  static void run_shapes(const ForwardTask& task, const Stream& stream) {
    if (task.total_q == 0) return;
    if (task.total_q > kFewRows) run_shape<HopperForwardShapes<D, DV, SOFTCAP>, SOFTCAP>(task, 0, stream);
    ForwardTask few = task;
    few.tiles = task.few_tiles;
    run_shape<HopperForwardFewShapes<D, DV>, SOFTCAP>(few, few_rows_stack(task), stream);
  }

  template <class Shape, bool SOFTCAP>
  static void run_shape(const ForwardTask& task, int stack, const Stream& stream) {
    launch_persistent<Shape>(
        stream, &hopper_forward_kernel<T, Shape, SOFTCAP>,
        tensor_map("query", task.query, task.total_q, task.heads_q, task.head_dim, Shape::kRows >> stack, 1 << stack),
        tensor_map("key", task.key, task.total_k, task.heads_k, task.head_dim, Shape::kKeys),
        tensor_map("value", task.value, task.total_k, task.heads_k, task.head_dim_v, Shape::kKeys),
        ForwardArguments(task), stack);
  }
};

}  // namespace packattn::cuda
