// bfloat16 and float16 numbers, and the tensor core's rounding.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>

namespace packattn::emu {

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float from_bf16(uint16_t h) { return as_float(static_cast<uint32_t>(h) << 16); }
inline uint16_t to_bf16(float f) {
  if (f != f) return 0x7FFF;
  const uint32_t u = as_bits(f);
  return static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

inline float from_f16_bits(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h >> 15) << 31, exponent = h >> 10 & 31u, mantissa = h & 1023u;
  if (exponent == 31) return as_float(sign | 0x7F800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline float from_f16(uint16_t h) {
  static const auto table = [] {
    auto t = std::make_unique<std::array<float, 65536>>();
    for (uint32_t i = 0; i < 65536; ++i) (*t)[i] = from_f16_bits(static_cast<uint16_t>(i));
    return t;
  }();
  return (*table)[h];
}
inline uint16_t to_f16(float f) {
  const uint32_t sign = as_bits(f) >> 16 & 0x8000u;
  const float magnitude = std::fabs(f);
  if (f != f) return 0x7FFF;
  if (magnitude >= 65520.f) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 6.103515625e-05f) {  // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::lrint(static_cast<double>(magnitude) * 16777216.0)));
  }
  uint32_t u = as_bits(magnitude);
  u += 0xFFFu + (u >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((u >> 13) - (112u << 10)));
}

enum class Element : int { bf16 = 0, f16 = 1 };

inline float widen(Element element, uint16_t h) { return element == Element::f16 ? from_f16(h) : from_bf16(h); }
inline uint16_t narrow(Element element, float f) { return element == Element::f16 ? to_f16(f) : to_bf16(f); }

// To float, toward zero: a tensor core adds no better than that.
inline float toward_zero(double x) {
  const float r = static_cast<float>(x);
  if (!std::isfinite(x) || std::fabs(static_cast<double>(r)) <= std::fabs(x)) return r;
  return as_float(as_bits(r) - 1);  // the next smaller magnitude; from infinity: the largest finite number
}

}  // namespace packattn::emu
