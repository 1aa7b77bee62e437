#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_bfloat16_128_128() { return BackwardLaunch<bf16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
