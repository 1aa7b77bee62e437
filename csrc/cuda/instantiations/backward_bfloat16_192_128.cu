#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_bfloat16_192_128() { return BackwardLaunch<bf16_t, 192, 128>::kernel(); }

}  // namespace packattn::cuda
