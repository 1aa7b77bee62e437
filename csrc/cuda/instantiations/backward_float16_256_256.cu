#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_float16_256_256() { return BackwardLaunch<f16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
