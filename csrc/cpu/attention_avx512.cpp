// The kernels for one instruction set. sources.cmake says with which options this file is compiled.
#define PACKATTN_ISA avx512
#include "simd_avx512.h"
// its vector layer comes first
#include "simd_math.h"
// then what is built on it
#include "attention_backward.h"
#include "attention_forward.h"

namespace packattn::cpu::PACKATTN_ISA {

const Kernels kernels = {"avx512", forward_scratch, forward,  backward_scratch,
                         delta,    backward_direct, backward, sink_gradient};

}  // namespace packattn::cpu::PACKATTN_ISA
