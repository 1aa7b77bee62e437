#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_float16_64_64() { return BackwardLaunch<f16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
