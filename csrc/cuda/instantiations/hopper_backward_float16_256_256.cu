#include "../hopper_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel hopper_backward_float16_256_256() { return HopperBackwardLaunch<f16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
