// Which tiles the backward kernels have at each head dim, and their launches. Included by instantiations/backward_*.cu.
//
// Each head dim has one set of tiles for multiprocessors with 164 KB of shared memory or more and, where that does not
// fit, one for parts with 99 KB (sm_86, sm_89, sm_120). What decided each: docs/cuda.md.
#pragma once
#include "attention_backward.cuh"
#include "attention_backward_query.cuh"
#include "attention_backward_stats.cuh"
#include "launch.cuh"

namespace packattn::cuda {

template <class T, int D, int DV>
struct BackwardShapes;
template <class T>
struct BackwardShapes<T, 64, 64> {
  using Keys = BackwardKeyShape<T, 64, 64, 4, 1, 2, 64, 16, 2, 3, false, 2>;
  using KeysSmall = Keys;
  using Query = BackwardQueryShape<T, 64, 64, 4, 1, 2, 64, 16, 2, true, true, 2>;
  using QuerySmall = Query;
};
template <class T>
struct BackwardShapes<T, 96, 96> {
  using Keys = BackwardKeyShape<T, 96, 96, 8, 1, 1, 64, 32, 2, 6, true, 1>;
  using KeysSmall = Keys;
  using Query = BackwardQueryShape<T, 96, 96, 8, 1, 1, 64, 32, 2, true, true, 1>;
  using QuerySmall = Query;
};
template <class T>
struct BackwardShapes<T, 128, 128> {
  using Keys = BackwardKeyShape<T, 128, 128, 8, 2, 2, 64, 64, 2, 0, false, 1>;
  using KeysSmall = BackwardKeyShape<T, 128, 128, 8, 1, 1, 32, 32, 2, 0, false, 1>;
  using Query = BackwardQueryShape<T, 128, 128, 8, 1, 1, 64, 32, 2, true, true, 1>;
  using QuerySmall = BackwardQueryShape<T, 128, 128, 8, 1, 1, 32, 32, 2, true, true, 1>;
};
template <class T>
struct BackwardShapes<T, 192, 128> {
  using Keys = BackwardKeyShape<T, 192, 128, 8, 1, 1, 32, 16, 2, 0, false, 1>;
  using KeysSmall = BackwardKeyShape<T, 192, 128, 4, 1, 1, 32, 16, 2, 0, false, 1>;
  using Query = BackwardQueryShape<T, 192, 128, 8, 1, 1, 32, 32, 2, true, false, 1>;
  using QuerySmall = BackwardQueryShape<T, 192, 128, 4, 1, 1, 32, 32, 2, true, false, 1>;
};
template <class T>
struct BackwardShapes<T, 256, 256> {
  using Keys = BackwardKeyShape<T, 256, 256, 8, 2, 1, 32, 32, 2, 0, false, 1>;
  using KeysSmall = BackwardKeyShape<T, 256, 256, 4, 2, 1, 32, 32, 1, 0, false, 1>;
  using Query = BackwardQueryShape<T, 256, 256, 8, 2, 1, 32, 32, 2, true, false, 1>;
  using QuerySmall = BackwardQueryShape<T, 256, 256, 4, 1, 1, 32, 32, 1, false, false, 1>;
};

// BackwardTask::scratch: the row statistics.
inline size_t statistics_bytes(const AttentionBackwardParams& params) {
  return static_cast<size_t>(params.total_q) * static_cast<size_t>(params.heads_q) * sizeof(float2);
}

// Row statistics and the gradient of the sinks.
template <class T>
void run_statistics(const BackwardTask& task, const Stream& stream) {
  const int64_t rows = task.total_q * task.heads_q, rows_per_block = kStatsThreads / kStatsLanes;
  const int64_t wanted = (rows + rows_per_block - 1) / rows_per_block, most = stream.device.multiprocessors * 16;
  launch(stream, &attention_backward_stats<T>, wanted < most ? wanted : most, kStatsThreads, 0, task);
  if (task.dsinks != nullptr) {
    launch(stream, &attention_backward_sinks<kSinkThreads>, task.heads_q, kSinkThreads, kSinkSharedBytes, task);
  }
}

template <class T, int D, int DV>
struct BackwardLaunch {
  using Shapes = BackwardShapes<T, D, DV>;

  template <class S>
  static bool fits(const Device& device) {
    return S::kSharedBytes <= device.shared_memory_optin;
  }
  static int query_rows(const Device& device) {
    return fits<typename Shapes::Query>(device) ? Shapes::Query::kRows : Shapes::QuerySmall::kRows;
  }
  static int key_rows(const Device& device) {
    return fits<typename Shapes::Keys>(device) ? Shapes::Keys::kKeys : Shapes::KeysSmall::kKeys;
  }

  template <class S>
  static void run_keys(const BackwardTask& task, const Stream& stream) {
    launch_persistent<S>(
        stream, task.softcap > 0.f ? &attention_backward_keys<S, true> : &attention_backward_keys<S, false>, task);
  }
  template <class S>
  static void run_query(const BackwardTask& task, const Stream& stream) {
    launch_persistent<S>(
        stream, task.softcap > 0.f ? &attention_backward_query<S, true> : &attention_backward_query<S, false>, task);
  }

  static void run(const BackwardTask& task, const Stream& stream) {
    run_statistics<T>(task, stream);
    if (fits<typename Shapes::Keys>(stream.device)) {
      run_keys<typename Shapes::Keys>(task, stream);
    } else {
      run_keys<typename Shapes::KeysSmall>(task, stream);
    }
    if (fits<typename Shapes::Query>(stream.device)) {
      run_query<typename Shapes::Query>(task, stream);
    } else {
      run_query<typename Shapes::QuerySmall>(task, stream);
    }
  }

  static BackwardKernel kernel() { return {&query_rows, &key_rows, &statistics_bytes, &run}; }
};

}  // namespace packattn::cuda
