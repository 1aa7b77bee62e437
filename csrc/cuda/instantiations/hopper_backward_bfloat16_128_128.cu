#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_bfloat16_128_128() { return HopperBackwardLaunch<bf16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
