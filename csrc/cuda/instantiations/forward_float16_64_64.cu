#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_float16_64_64() { return ForwardLaunch<f16_t, 64, 64>::kernel(); }

}  // namespace packattn::cuda
