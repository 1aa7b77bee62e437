#include "../hopper_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel hopper_forward_bfloat16_128_128() { return HopperForwardLaunch<bf16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
