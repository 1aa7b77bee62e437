#include "../hopper_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel hopper_forward_float16_192_128() { return HopperForwardLaunch<f16_t, 192, 128>::kernel(); }

}  // namespace packattn::cuda
