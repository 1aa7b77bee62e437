// The plain kernels: float32, bfloat16 and float16, any head dims up to 512, any GPU; no tensor cores.
#pragma once
#include <cstddef>

#include "../common/params.h"
#include "device.h"

namespace packattn::cuda {

size_t plain_backward_workspace_bytes(const AttentionBackwardParams& params);

void plain_forward(const AttentionForwardParams& params, const Stream& stream);
void plain_backward(const AttentionBackwardParams& params, void* workspace, const Stream& stream);

}  // namespace packattn::cuda
