// The vector layer without any particular instruction set: GCC vector extensions of 4 floats, which are SSE2
// registers on x86-64 and NEON registers on arm64. It also says what each function of the layer means.
#pragma once
#include <cstdint>
#include <cstring>

#include "element.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace packattn::cpu::PACKATTN_ISA {

constexpr int VW = 4;  // floats per vector
// Rows of a register tile, which is 16 columns wide: MR * 16 / VW accumulators, and a little more.
#if defined(__aarch64__)
constexpr int MR = 6;  // 32 registers
#else
constexpr int MR = 3;  // 16 registers
#endif
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

PACKATTN_INLINE vf vset(float x) { return vf{x, x, x, x}; }
PACKATTN_INLINE vf vzero() { return vset(0.f); }
PACKATTN_INLINE vf vbcast(const float* p) { return vset(*p); }
PACKATTN_INLINE vf viota() { return vf{0, 1, 2, 3}; }

// a * b + c, fused where the machine has it
PACKATTN_INLINE vf vfma(vf a, vf b, vf c) {
#if defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
PACKATTN_INLINE vf vadd(vf a, vf b) { return a + b; }
PACKATTN_INLINE vf vsub(vf a, vf b) { return a - b; }
PACKATTN_INLINE vf vmul(vf a, vf b) { return a * b; }
PACKATTN_INLINE vf vdiv(vf a, vf b) { return a / b; }
PACKATTN_INLINE vf vselect(vi condition, vf x, vf y) { return (vf)((condition & (vi)x) | (~condition & (vi)y)); }
// a > b ? a : b; b where either is NaN
PACKATTN_INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }
// x where lo <= j < hi, else other
PACKATTN_INLINE vf vkeep(vf x, vf j, vf lo, vf hi, vf other) { return vselect((j >= lo) & (j < hi), x, other); }
// a < b ? x : y
PACKATTN_INLINE vf vselect_less(vf a, vf b, vf x, vf y) { return vselect(a < b, x, y); }
PACKATTN_INLINE vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
PACKATTN_INLINE vf vcopysign(vf magnitude, vf sign) {
  return (vf)(((vi)magnitude & 0x7fffffff) | ((vi)sign & (vi)vset(-0.f)));
}
// the bits of x, shifted left by 23
PACKATTN_INLINE vf vshift_left_23(vf x) { return (vf)((vi)x << 23); }
// x = mantissa * 2^exponent, 1 <= mantissa < 2, for positive normal x
PACKATTN_INLINE void vsplit(vf x, vf& exponent, vf& mantissa) {
  exponent = __builtin_convertvector(((vi)x >> 23) - 127, vf);
  mantissa = (vf)(((vi)x & 0x7fffff) | 0x3f800000);
}
PACKATTN_INLINE float vhmax(vf x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
PACKATTN_INLINE float vhsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// Loads and stores of VW elements, unaligned. Stores round to nearest even; NaN stays NaN.
PACKATTN_INLINE vf vload(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
PACKATTN_INLINE void vstore(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

PACKATTN_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
PACKATTN_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
PACKATTN_INLINE float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
PACKATTN_INLINE void from_float(bf16& to, float x) {
  const uint32_t u = bits_of(x);
  to.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
PACKATTN_INLINE float to_float(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return float_of(sign | rest | 0x7f800000);  // infinity, NaN
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));            // the exponent's bias; subnormals too
}
PACKATTN_INLINE void from_float(fp16& to, float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
  uint32_t y;
  if (rest > 0x7f800000) {
    y = 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    y = 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: 0.5f has just the ulp that a half's subnormals have
    y = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
  } else {
    y = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  }
  to.bits = uint16_t(sign | y);
}
template <class T>
PACKATTN_INLINE vf vload(const T* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
PACKATTN_INLINE void vstore(T* p, vf x) {
  PACKATTN_UNROLL for (int i = 0; i < 4; i++) from_float(p[i], x[i]);
}

// The first 8 elements only, for vectors of 16 (rows are multiples of 8); missing lanes load as 0.
template <class T>
PACKATTN_INLINE vf vload_half(const T* p) {
  return vload(p);
}
template <class T>
PACKATTN_INLINE void vstore_half(T* p, vf x) {
  vstore(p, x);
}

#if defined(__clang__)
#define PACKATTN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has that only from 12 on
#define PACKATTN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// p[i] = sum of the lanes of x[i], for four vectors
PACKATTN_INLINE void vstore_sums(float* p, const vf x[4]) {
  PACKATTN_UNROLL for (int i = 0; i < 4; i++) p[i] = vhsum(x[i]);
}
// VW x VW transpose: lane j of r[i] and lane i of r[j] change places
PACKATTN_INLINE void vtranspose(vf r[4]) {
  const vf a = PACKATTN_SHUFFLE(r[0], r[1], 0, 4, 1, 5), b = PACKATTN_SHUFFLE(r[0], r[1], 2, 6, 3, 7);
  const vf c = PACKATTN_SHUFFLE(r[2], r[3], 0, 4, 1, 5), d = PACKATTN_SHUFFLE(r[2], r[3], 2, 6, 3, 7);
  r[0] = PACKATTN_SHUFFLE(a, c, 0, 1, 4, 5);
  r[1] = PACKATTN_SHUFFLE(a, c, 2, 3, 6, 7);
  r[2] = PACKATTN_SHUFFLE(b, d, 0, 1, 4, 5);
  r[3] = PACKATTN_SHUFFLE(b, d, 2, 3, 6, 7);
}
#undef PACKATTN_SHUFFLE

}  // namespace packattn::cpu::PACKATTN_ISA
