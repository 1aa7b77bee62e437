#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_float16_96_96() { return BackwardLaunch<f16_t, 96, 96>::kernel(); }

}  // namespace packattn::cuda
