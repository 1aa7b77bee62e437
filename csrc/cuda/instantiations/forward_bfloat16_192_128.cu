#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_192_128() { return ForwardLaunch<bf16_t, 192, 128>::kernel(); }

}  // namespace packattn::cuda
