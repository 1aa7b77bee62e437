#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_bfloat16_192_128() { return HopperBackwardLaunch<bf16_t, 192, 128>::kernel(); }

}  // namespace packattn::cuda
