#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_256_256() { return ForwardLaunch<bf16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
