#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_128_128() { return ForwardLaunch<bf16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
