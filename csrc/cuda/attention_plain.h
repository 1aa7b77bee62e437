// The plain kernels: float32, bfloat16 and float16, any head dims, any GPU; no tensor cores.
#pragma once
#include <cstddef>

#include "../common/params.h"
#include "device.h"

namespace packattn::cuda {

// Bytes of device memory, aligned to 256, that a call takes as `workspace`.
size_t plain_forward_workspace_bytes(const AttentionForwardParams& params);
size_t plain_backward_workspace_bytes(const AttentionBackwardParams& params);

void plain_forward(const AttentionForwardParams& params, void* workspace, const Stream& stream);
void plain_backward(const AttentionBackwardParams& params, void* workspace, const Stream& stream);

}  // namespace packattn::cuda
