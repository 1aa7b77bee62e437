#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_float16_128_128() { return ForwardLaunch<f16_t, 128, 128>::kernel(); }

}  // namespace packattn::cuda
