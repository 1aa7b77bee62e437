#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_64_64() { return ForwardLaunch<bf16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
