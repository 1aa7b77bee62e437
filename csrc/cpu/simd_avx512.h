// The vector layer for AVX-512 (F, BW, DQ, VL): 16 floats, 32 registers. What each function means: simd_portable.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "element.h"

namespace packattn::cpu::PACKATTN_ISA {

constexpr int VW = 16;
// One vector per tile row: the row's broadcast is then a memory operand of the FMA itself, and a tile is no
// wider than a diagonal needs.
constexpr int MR = 12;
using vf = __m512;

PACKATTN_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
PACKATTN_INLINE vf vzero() { return _mm512_setzero_ps(); }
PACKATTN_INLINE vf vbcast(const float* p) { return _mm512_set1_ps(*p); }
PACKATTN_INLINE vf viota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

PACKATTN_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PACKATTN_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
PACKATTN_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PACKATTN_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PACKATTN_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
PACKATTN_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
PACKATTN_INLINE vf vkeep(vf x, vf j, vf lo, vf hi, vf other) {
  const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(j, lo, _CMP_GE_OQ), j, hi, _CMP_LT_OQ);
  return _mm512_mask_blend_ps(in, other, x);
}
PACKATTN_INLINE vf vselect_less(vf a, vf b, vf x, vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
PACKATTN_INLINE vf vabs(vf x) { return _mm512_andnot_ps(vset(-0.f), x); }
PACKATTN_INLINE vf vcopysign(vf magnitude, vf sign) {
  return _mm512_or_ps(_mm512_andnot_ps(vset(-0.f), magnitude), _mm512_and_ps(vset(-0.f), sign));
}
PACKATTN_INLINE vf vshift_left_23(vf x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
PACKATTN_INLINE void vsplit(vf x, vf& exponent, vf& mantissa) {
  const __m512i bits = _mm512_castps_si512(x);
  exponent = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127)));
  mantissa = _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff)), _mm512_set1_epi32(0x3f800000)));
}
PACKATTN_INLINE float vhmax(vf x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
PACKATTN_INLINE float vhsum(vf x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

PACKATTN_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
PACKATTN_INLINE void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
PACKATTN_INLINE vf from_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
PACKATTN_INLINE __m256i to_bf16(vf x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i y = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, y, _mm512_set1_epi32(0x7fc0)));
}
PACKATTN_INLINE vf vload(const bf16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
PACKATTN_INLINE void vstore(bf16* p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
PACKATTN_INLINE vf vload(const fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PACKATTN_INLINE void vstore(fp16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

PACKATTN_INLINE vf vload_half(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
PACKATTN_INLINE void vstore_half(float* p, vf x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }
PACKATTN_INLINE __m256i load_8_words(const void* p) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
PACKATTN_INLINE vf vload_half(const bf16* p) { return from_bf16(load_8_words(p)); }
PACKATTN_INLINE void vstore_half(bf16* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(to_bf16(x)));
}
PACKATTN_INLINE vf vload_half(const fp16* p) { return _mm512_cvtph_ps(load_8_words(p)); }
PACKATTN_INLINE void vstore_half(fp16* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)));
}

PACKATTN_INLINE void vstore_sums(float* p, const vf x[4]) {
  __m256 h[4];
  PACKATTN_UNROLL for (int i = 0; i < 4; i++)
    h[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
PACKATTN_INLINE void vtranspose(vf r[16]) {
  vf t[16];
  PACKATTN_UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  // r[4i + c]: 128-bit lane L holds column 4L + c of the rows 4i..4i+3
  PACKATTN_UNROLL for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  PACKATTN_UNROLL for (int c = 0; c < 4; c++) {
    const vf even0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), even1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const vf odd0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), odd1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    r[c] = _mm512_shuffle_f32x4(even0, even1, 0x88);
    r[4 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
    r[8 + c] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
    r[12 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  }
}

}  // namespace packattn::cpu::PACKATTN_ISA
