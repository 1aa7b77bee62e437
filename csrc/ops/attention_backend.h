// What attention.cpp asks of the device that it is built for: whether kernels serve a call, and to run them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "../common/params.h"
#include "../cpu/metadata.h"
#include "checks.h"

#if defined(PACKATTN_BACKEND_CPU)
#include "../common/serves.h"
#include "../cpu/attention.h"
#include "executor.h"
#else
#include "../cuda/attention.h"
#include "../cuda/select.h"
#include "stream.h"
#endif
#if defined(PACKATTN_BACKEND_EMULATED)
#include "emulated_buffers.h"  // tests/emulated
#endif

namespace packattn::ops::backend {

#if defined(PACKATTN_BACKEND_EMULATED)
constexpr const char* kForwardReference = "packattn_emulated::attention_forward_reference";
constexpr const char* kBackwardReference = "packattn_emulated::attention_backward_reference";
#else
constexpr const char* kForwardReference = "packattn::attention_forward_reference";
constexpr const char* kBackwardReference = "packattn::attention_backward_reference";
#endif

#if defined(PACKATTN_BACKEND_CPU)

// Why the compiled kernels do not serve these; empty if they do.
inline std::vector<std::string> refusals(const char* dtype, int64_t head_dim, int64_t head_dim_v) {
  return cpu_refusals(dtype, head_dim, head_dim_v);
}

// Whether a kernel can read a tensor whose last dimension is contiguous.
inline bool is_aligned(const TensorView&, int /*element_bytes*/) { return true; }

// Whether values of key ranges are to be checked outside of the kernels.
inline bool checks_ranges(bool kernel_runs) { return !kernel_runs; }  // kernels check what they read

inline void attention_forward(const AttentionForwardParams& params, const Place&) {
  cpu::attention_forward(params, torch_executor());
}

inline void attention_backward(const AttentionBackwardParams& params, const Place&) {
  cpu::attention_backward(params, torch_executor());
}

#else

inline std::vector<std::string> refusals(const char* dtype, int64_t head_dim, int64_t head_dim_v) {
  return cuda::cuda_refusals(dtype, head_dim, head_dim_v);
}

inline bool is_aligned(const TensorView& view, int element_bytes) { return cuda::is_aligned(view, element_bytes); }

// Looking at values waits for the device, so only on request; kernels clamp what they read.
inline bool checks_ranges(bool /*kernel_runs*/) { return validates(); }

inline void attention_forward(const AttentionForwardParams& params, const Place& place) {
  const cuda::Stream stream = current_stream(place);
  const size_t bytes = cuda::forward_workspace_bytes(params, stream.device);
  const Scratch scratch(place, bytes);
#if defined(PACKATTN_BACKEND_EMULATED)
  const EmulatedBuffers buffers(params, scratch.data(), bytes);
#endif
  cuda::attention_forward(params, scratch.data(), stream);
}

inline void attention_backward(const AttentionBackwardParams& params, const Place& place) {
  const cuda::Stream stream = current_stream(place);
  const size_t bytes = cuda::backward_workspace_bytes(params, stream.device);
  const Scratch scratch(place, bytes);
#if defined(PACKATTN_BACKEND_EMULATED)
  const EmulatedBuffers buffers(params, scratch.data(), bytes);
#endif
  cuda::attention_backward(params, scratch.data(), stream);
}

#endif

}  // namespace packattn::ops::backend
