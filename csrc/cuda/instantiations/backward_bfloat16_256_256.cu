#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_bfloat16_256_256() { return BackwardLaunch<bf16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
