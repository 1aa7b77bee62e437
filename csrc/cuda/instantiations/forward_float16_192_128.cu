#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_float16_192_128() { return ForwardLaunch<f16_t, 192, 128>::kernel(); }

}  // namespace packattn::cuda
