// Gives a kernel the threads of torch's own pool.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>

#include "../common/params.h"

namespace packattn::ops {

// Executor::run on at::parallel_for. Inside another parallel region, or with one thread, the workers run one after the
// other on the caller. An exception must not cross the pool, so it is kept and thrown again here; of several, the one
// of the lowest worker, so that the message does not depend on timing.
inline void run_on_torch_threads(int workers, void (*body)(void* context, int worker), void* context) {
  std::mutex mutex;
  std::exception_ptr error;
  int64_t error_worker = std::numeric_limits<int64_t>::max();
  torch::stable::parallel_for(0, workers, /*grain_size=*/1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t worker = begin; worker < end; ++worker) {
      try {
        body(context, static_cast<int>(worker));
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (worker < error_worker) {
          error_worker = worker;
          error = std::current_exception();
        }
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

inline Executor torch_executor() {
  Executor executor;
  executor.workers = static_cast<int>(std::max<uint32_t>(1, torch::stable::get_num_threads()));
  executor.run = &run_on_torch_threads;
  return executor;
}

}  // namespace packattn::ops
