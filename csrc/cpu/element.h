// Storage types of the 16-bit floats, and the compiler hints that the kernels use.
#pragma once
#include <cstdint>

// The kernels' files are compiled for one instruction set each. Whatever they define must be inlined or live in
// their own namespace: a shared inline function, compiled for AVX-512 and merged by the linker, would run on
// machines without it.
#define PACKATTN_INLINE static inline __attribute__((always_inline))
#define PACKATTN_ALWAYS inline __attribute__((always_inline))
#define PACKATTN_NOINLINE __attribute__((noinline))
#define PACKATTN_UNROLL _Pragma("GCC unroll 16")

namespace packattn::cpu {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

}  // namespace packattn::cpu
