#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_bfloat16_64_64() { return BackwardLaunch<bf16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
