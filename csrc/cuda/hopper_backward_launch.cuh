// Which tiles the Hopper backward has at each head dim, and its launches. Included by
// instantiations/hopper_backward_*.cu.
#pragma once
#include "attention_backward_launch.cuh"
#if __has_include("hopper_backward_keys.cuh")
#include "hopper_backward_keys.cuh"
#define PACKATTN_HOPPER_BACKWARD_KEYS
#endif
#if __has_include("hopper_backward_query.cuh")
#include "hopper_backward_query.cuh"
#define PACKATTN_HOPPER_BACKWARD_QUERY
#endif
#include "launch.cuh"
#include "tensor_map.cuh"

namespace packattn::cuda {

template <int D, int DV, int PASS, bool SOFTCAP>
struct HopperBackwardKeyShapes;
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<64, 64, 0, SOFTCAP> : HopperBackwardKeyShape<64, 64, 2, 112, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<128, 128, 0, SOFTCAP> : HopperBackwardKeyShape<128, 128, 2, 64, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<192, 128, 0, SOFTCAP> : HopperBackwardKeyShape<192, 128, 2, 32, 4, 0> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<256, 256, 1, SOFTCAP> : HopperBackwardKeyShape<256, 256, 2, 64, 2, 1> {};
template <bool SOFTCAP>
struct HopperBackwardKeyShapes<256, 256, 2, SOFTCAP> : HopperBackwardKeyShape<256, 256, 2, 48, 2, 2> {};

template <class T, int D, int DV>
struct HopperBackwardLaunch {
  static int query_rows([[maybe_unused]] const Device& device) {
#ifdef PACKATTN_HOPPER_BACKWARD_QUERY
    return HopperBackwardQueryShapes<T, D, DV, false>::kRows;
#else
    return BackwardLaunch<T, D, DV>::query_rows(device);
#endif
  }
  static int key_rows([[maybe_unused]] const Device& device) {
#ifdef PACKATTN_HOPPER_BACKWARD_KEYS
    return HopperBackwardKeyShapes<D, DV, kFirstPass, false>::kKeys;
#else
    return BackwardLaunch<T, D, DV>::key_rows(device);
#endif
  }

  static void run(const BackwardTask& task, const Stream& stream) {
    run_statistics<T>(task, stream);
    task.softcap > 0.f ? run_shapes<true>(task, stream) : run_shapes<false>(task, stream);
  }

  static BackwardKernel kernel() { return {&query_rows, &key_rows, &statistics_bytes, &run}; }

 private:
  static constexpr int kFirstPass = D == 256 ? 1 : 0;

  template <bool SOFTCAP>
  static void run_shapes(const BackwardTask& task, const Stream& stream) {
#ifdef PACKATTN_HOPPER_BACKWARD_KEYS
    run_keys<HopperBackwardKeyShapes<D, DV, kFirstPass, SOFTCAP>, SOFTCAP>(task, stream);
    if constexpr (kFirstPass == 1) run_keys<HopperBackwardKeyShapes<D, DV, 2, SOFTCAP>, SOFTCAP>(task, stream);
#else
    BackwardLaunch<T, D, DV>::template run_keys<typename BackwardShapes<T, D, DV>::Keys>(task, stream);
#endif
#ifdef PACKATTN_HOPPER_BACKWARD_QUERY
    using Shape = HopperBackwardQueryShapes<T, D, DV, SOFTCAP>;
    run_kernel<Shape>(&hopper_backward_query<T, Shape, SOFTCAP>, task, stream, Shape::kRows, Shape::kKeys);
#else
    BackwardLaunch<T, D, DV>::template run_query<typename BackwardShapes<T, D, DV>::Query>(task, stream);
#endif
  }

  template <class Shape, bool SOFTCAP>
  static void run_keys(const BackwardTask& task, const Stream& stream) {
#ifdef PACKATTN_HOPPER_BACKWARD_KEYS
    run_kernel<Shape>(&hopper_backward_keys<T, Shape, SOFTCAP>, task, stream, Shape::kRows, Shape::kKeys);
#endif
  }

  // rows, keys: of a bulk copy of query and dout, of key and value.
  template <class Shape, class Kernel>
  static void run_kernel(Kernel kernel, const BackwardTask& task, const Stream& stream, int rows, int keys) {
    launch(stream, kernel, stream.device.multiprocessors, Shape::kThreads, Shape::kSharedBytes,
           tensor_map("query", task.query, task.total_q, task.heads_q, task.head_dim, rows),
           tensor_map("dout", task.dout, task.total_q, task.heads_q, task.head_dim_v, rows),
           tensor_map("key", task.key, task.total_k, task.heads_k, task.head_dim, keys),
           tensor_map("value", task.value, task.total_k, task.heads_k, task.head_dim_v, keys), task);
  }
};

}  // namespace packattn::cuda
