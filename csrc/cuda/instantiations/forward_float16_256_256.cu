#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_float16_256_256() { return ForwardLaunch<f16_t, 256, 256>::kernel(); }

}  // namespace packattn::cuda
