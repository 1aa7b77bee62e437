#include "../attention_forward_launch.cuh"
#include "../instantiations.h"

namespace packattn::cuda {

ForwardKernel forward_bfloat16_96_96() { return ForwardLaunch<bf16_t, 96, 96>::kernel(); }

}  // namespace packattn::cuda
