// Elementary functions over the vector layer. Include it after the instruction set's simd_*.h.
#pragma once

namespace packattn::cpu::PACKATTN_ISA {

// e^x for x <= 88. e^x = 2^n 2^f with n = round(x log2 e); both n and f come from fused products, so that large |x|
// costs no accuracy. Degree-5 minimax polynomial on [-1/2, 1/2], relative error 2.2e-7 measured. Below -87.7 the
// result is exactly 0, so -inf (a masked score) gives 0; NaN passes through (the order of vmax's operands).
PACKATTN_INLINE vf vexp(vf x) {
  const vf log2e = vset(1.44269504f);
  const vf magic = vset(12582912.f + 127.f);  // 1.5 * 2^23 + bias: the low bits of the sum are n + 127
  x = vmax(vset(-88.02f), x);
  const vf t = vfma(x, log2e, magic);
  const vf f = vfma(x, log2e, vsub(magic, t));
  vf p = vset(0x1.5c08e4p-10f);
  p = vfma(p, f, vset(0x1.3d0c54p-7f));
  p = vfma(p, f, vset(0x1.c6b6e4p-5f));
  p = vfma(p, f, vset(0x1.ebf918p-3f));
  p = vfma(p, f, vset(0x1.62e428p-1f));
  p = vfma(p, f, vset(1.f));
  return vmul(p, vshift_left_23(t));
}

// Natural logarithm of a positive normal number; NaN and infinity pass through. ln(m * 2^e) = e ln 2 + ln m with
// m in [1/sqrt 2, sqrt 2), ln(1 + f) = f + f^2 (f P(f) - 1/2), P fitted to 6e-9.
PACKATTN_INLINE vf vlog(vf x) {
  vf e, m;
  vsplit(x, e, m);
  const vf big = vset(1.41421356f);
  e = vselect_less(m, big, e, vadd(e, vset(1.f)));
  m = vselect_less(m, big, m, vmul(m, vset(0.5f)));
  const vf f = vsub(m, vset(1.f));
  vf p = vset(-0x1.422a76p-4f);
  p = vfma(p, f, vset(0x1.07c3f6p-3f));
  p = vfma(p, f, vset(-0x1.0cce6cp-3f));
  p = vfma(p, f, vset(0x1.226f82p-3f));
  p = vfma(p, f, vset(-0x1.547ab8p-3f));
  p = vfma(p, f, vset(0x1.99a590p-3f));
  p = vfma(p, f, vset(-0x1.000216p-2f));
  p = vfma(p, f, vset(0x1.55554ap-2f));
  const vf r = vfma(e, vset(0.693147181f), vfma(vmul(f, f), vfma(p, f, vset(-0.5f)), f));
  return vselect_less(x, vset(__builtin_inff()), r, x);  // the comparison is false for NaN
}

// Hyperbolic tangent: an odd polynomial (fitted to 4e-9 relative) below 0.625, 1 - 2 / (e^2x + 1) above.
PACKATTN_INLINE vf vtanh(vf x) {
  const vf a = vabs(x), z = vmul(x, x);
  vf p = vset(-0x1.76abf6p-8f);
  p = vfma(p, z, vset(0x1.5256cep-6f));
  p = vfma(p, z, vset(-0x1.b84448p-5f));
  p = vfma(p, z, vset(0x1.110768p-3f));
  p = vfma(p, z, vset(-0x1.555534p-2f));
  const vf small = vfma(vmul(p, z), x, x);
  const vf limit = vset(20.f);  // e^40 is finite, and tanh is 1 there
  const vf e = vexp(vmul(vset(2.f), vselect_less(a, limit, a, limit)));
  const vf large = vcopysign(vsub(vset(1.f), vdiv(vset(2.f), vadd(e, vset(1.f)))), x);
  const vf y = vselect_less(a, vset(0.625f), small, large);
  return vselect_less(a, vset(__builtin_inff()), y, vselect_less(vzero(), a, large, x));  // NaN stays NaN
}

}  // namespace packattn::cpu::PACKATTN_ISA
