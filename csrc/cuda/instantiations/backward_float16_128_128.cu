#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_float16_128_128() { return BackwardLaunch<f16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
