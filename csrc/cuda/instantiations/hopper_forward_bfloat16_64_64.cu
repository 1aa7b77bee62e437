#include "../hopper_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel hopper_forward_bfloat16_64_64() { return HopperForwardLaunch<bf16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
