#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_float16_64_64() { return HopperBackwardLaunch<f16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
