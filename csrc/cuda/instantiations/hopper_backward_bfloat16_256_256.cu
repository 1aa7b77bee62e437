#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_bfloat16_256_256() { return HopperBackwardLaunch<bf16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
