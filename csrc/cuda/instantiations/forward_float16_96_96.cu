#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_float16_96_96() { return ForwardLaunch<f16_t, 96, 96>::kernel(); }

}  // namespace packattn::cuda
