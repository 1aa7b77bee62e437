#include "../attention_backward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

BackwardKernel backward_bfloat16_96_96() { return BackwardLaunch<bf16_t, 96, 96>::kernel(); }

}  // namespace packattn::cuda
