#include "../hopper_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel hopper_forward_float16_64_64() { return HopperForwardLaunch<f16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
