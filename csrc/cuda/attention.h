// Attention over key ranges on CUDA devices: the entry points. What the fields of the params mean:
// csrc/common/params.h. All pointers are device memory; nothing here waits for the device.
#pragma once
#include <cstddef>

#include "../common/params.h"
#include "device.h"

namespace packattn::cuda {

// Bytes of scratch memory on the device, a function of sizes alone (never of values).
size_t forward_workspace_bytes(const AttentionForwardParams& params, const Device& device);
size_t backward_workspace_bytes(const AttentionBackwardParams& params, const Device& device);

// Writes every element of out and lse. Rows with key_begin >= key_end see nothing: out 0, lse -inf. Ranges are clamped
// to [0, total_k] where they are used: wrong ones give wrong numbers, never an access outside the buffers. workspace:
// forward_workspace_bytes() bytes, aligned to 256. Throws std::invalid_argument for what no kernel serves,
// std::runtime_error where CUDA refuses.
void attention_forward(const AttentionForwardParams& params, void* workspace, const Stream& stream);

// Writes every element of dquery, dkey, dvalue and (if given) dsinks. Deterministic, without atomics.
void attention_backward(const AttentionBackwardParams& params, void* workspace, const Stream& stream);

}  // namespace packattn::cuda
