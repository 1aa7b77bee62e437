// Which tiles the forward kernel has at each head dim, and its launch. Included by instantiations/forward_*.cu.
#pragma once
#include "attention_forward.cuh"
#include "launch.cuh"

namespace packattn::cuda {

// One set of tiles for all devices: every one fits the 99 KB a block has on sm_86, sm_89 and sm_120, so that a result
// does not depend on the device's memory. What decided each: docs/cuda.md.
//
//                          Q      ring        blocks a multiprocessor by
//                     rows (KB)   (KB)  sum   registers  164 KB  228 KB  100 KB
//   64,  64            128   16  3 x  8   41      2         3       5       2
//   96,  96            128   24  2 x 12   49      2         3       4       2
//   128, 128           128   32  3 x 16   81      2         2       2       1
//   192, 128           128   48   12 + 8  69      2         2       3       1
//   256, 256            64   32  3 x 16   80.5    2         2       2       1
template <int D, int DV>
struct ForwardShapes;
template <>
struct ForwardShapes<64, 64> : ForwardShape<64, 64, 4, 2, 64, 3, true, 2> {};
template <>
struct ForwardShapes<96, 96> : ForwardShape<96, 96, 4, 2, 64, 2, false, 2> {};
template <>
struct ForwardShapes<128, 128> : ForwardShape<128, 128, 4, 2, 64, 3, false, 2> {};
template <>
struct ForwardShapes<192, 128> : ForwardShape<192, 128, 4, 2, 32, 2, false, 2> {};
template <>
struct ForwardShapes<256, 256> : ForwardShape<256, 256, 4, 1, 32, 3, true, 2> {};

template <class T, int D, int DV>
struct ForwardLaunch {
  using Shape = ForwardShapes<D, DV>;

  static int tile_rows(const Device&) { return Shape::kRows; }

  static void run(const ForwardTask& task, const Stream& stream) {
    launch_persistent<Shape>(
        stream,
        task.softcap > 0.f ? &attention_forward_kernel<T, Shape, true> : &attention_forward_kernel<T, Shape, false>,
        ForwardArguments(task));
  }

  static ForwardKernel kernel() { return {&tile_rows, &run}; }
};

}  // namespace packattn::cuda
