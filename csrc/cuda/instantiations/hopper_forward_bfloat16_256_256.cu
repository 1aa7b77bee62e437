#include "../hopper_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel hopper_forward_bfloat16_256_256() { return HopperForwardLaunch<bf16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
