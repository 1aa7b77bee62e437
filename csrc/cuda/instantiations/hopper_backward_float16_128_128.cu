#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_float16_128_128() { return HopperBackwardLaunch<f16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
