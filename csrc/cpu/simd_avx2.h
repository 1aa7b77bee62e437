// The vector layer for AVX2, FMA and F16C: 8 floats, 16 registers. What each function means: simd_portable.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "element.h"

namespace packattn::cpu::PACKATTN_ISA {

constexpr int VW = 8;
constexpr int MR = 6;  // 12 accumulators + 2 columns + 1 broadcast <= 16 registers
using vf = __m256;

PACKATTN_INLINE vf vset(float x) { return _mm256_set1_ps(x); }
PACKATTN_INLINE vf vzero() { return _mm256_setzero_ps(); }
PACKATTN_INLINE vf vbcast(const float* p) { return _mm256_broadcast_ss(p); }
PACKATTN_INLINE vf viota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

PACKATTN_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PACKATTN_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
PACKATTN_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
PACKATTN_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
PACKATTN_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
PACKATTN_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
PACKATTN_INLINE vf vkeep(vf x, vf j, vf lo, vf hi, vf other) {
  const vf in = _mm256_and_ps(_mm256_cmp_ps(j, lo, _CMP_GE_OQ), _mm256_cmp_ps(j, hi, _CMP_LT_OQ));
  return _mm256_blendv_ps(other, x, in);
}
PACKATTN_INLINE vf vselect_less(vf a, vf b, vf x, vf y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
PACKATTN_INLINE vf vabs(vf x) { return _mm256_andnot_ps(vset(-0.f), x); }
PACKATTN_INLINE vf vcopysign(vf magnitude, vf sign) {
  return _mm256_or_ps(_mm256_andnot_ps(vset(-0.f), magnitude), _mm256_and_ps(vset(-0.f), sign));
}
PACKATTN_INLINE vf vshift_left_23(vf x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23)); }
PACKATTN_INLINE void vsplit(vf x, vf& exponent, vf& mantissa) {
  const __m256i bits = _mm256_castps_si256(x);
  exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  mantissa = _mm256_castsi256_ps(
      _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x3f800000)));
}
PACKATTN_INLINE float vhmax(vf x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
PACKATTN_INLINE float vhsum(vf x) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

PACKATTN_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
PACKATTN_INLINE void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
PACKATTN_INLINE vf vload(const bf16* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
PACKATTN_INLINE void vstore(bf16* p, vf x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i y = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  y = _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7fc0), nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
PACKATTN_INLINE vf vload(const fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PACKATTN_INLINE void vstore(fp16* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Rows are multiples of 8 elements, so no vector of 8 is ever cut short.
template <class T>
PACKATTN_INLINE vf vload_half(const T* p) {
  return vload(p);
}
template <class T>
PACKATTN_INLINE void vstore_half(T* p, vf x) {
  vstore(p, x);
}

PACKATTN_INLINE void vstore_sums(float* p, const vf x[4]) {
  const vf t = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
PACKATTN_INLINE void vtranspose(vf r[8]) {
  vf t[8], u[8];
  PACKATTN_UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  PACKATTN_UNROLL for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  PACKATTN_UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}

}  // namespace packattn::cpu::PACKATTN_ISA
