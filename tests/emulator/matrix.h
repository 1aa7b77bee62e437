// ldmatrix and mma.sync: matrices spread over a warp (layouts: csrc/cuda/ptx.cuh).
//
// The lanes of a register in order, exchange.in[r][0..31], are 64 consecutive 16-bit numbers, and in every fragment
// those are eight rows of eight: lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
#pragma once
#include "numbers.h"
#include "warp.h"

namespace packattn::emu {

using Halves = uint16_t __attribute__((vector_size(16), may_alias));
using Words = uint32_t __attribute__((vector_size(32), may_alias));
using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));

// Vectors are passed by reference: how one is passed by value depends on the instruction set compiled for.
template <class Vector>
__attribute__((always_inline)) inline const Vector& as(const void* aligned) {
  return *static_cast<const Vector*>(aligned);
}

// Three times the perfect shuffle of the rows' halves.
__attribute__((always_inline)) inline void transpose_8x8(Halves (&rows)[8]) {
  constexpr Halves kLow = {0, 8, 1, 9, 2, 10, 3, 11}, kHigh = {4, 12, 5, 13, 6, 14, 7, 15};
  for (int round = 0; round < 3; ++round) {
    Halves shuffled[8];
    for (int i = 0; i < 4; ++i) {
      shuffled[2 * i] = __builtin_shuffle(rows[i], rows[i + 4], kLow);
      shuffled[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 4], kHigh);
    }
    std::memcpy(rows, shuffled, sizeof rows);
  }
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, bool transposed, Site site) {
  const int lane = this_thread().lane();
  Exchange& exchange = my_exchange();
  exchange.in[0][lane] = row_address;
  meet(transposed ? kLdmatrixTrans : kLdmatrix, site, "ldmatrix", [transposed](Warp& warp, Site at) {
    Block& block = this_block();
    Counters& counters = report().counters;
    ++counters.ldmatrix;
    for (int m = 0; m < 4; ++m) {
      Halves rows[8];
      uint32_t banks = 0;  // groups of four banks: a row of 16 bytes fills one
      for (int i = 0; i < 8; ++i) {
        const uint32_t address = warp.exchange.in[0][m * 8 + i];
        const int thread = warp.number * 32 + m * 8 + i;
        if (!block.shared.accessible(thread, address, 16, 16, at, "ldmatrix")) {
          std::memset(&rows[i], 0xFF, 16);
          continue;
        }
        block.shared.on_read(block.order, thread, address, 16, at);
        rows[i] = as<Halves>(block.shared.at(address));
        const uint32_t bank = 1u << address / 16 % 8;
        counters.bank_conflicts += (banks & bank) != 0;
        banks |= bank;
      }
      if (transposed) transpose_8x8(rows);
      std::memcpy(warp.exchange.out[m], rows, sizeof rows);
    }
  });
  for (int m = 0; m < 4; ++m) r[m] = exchange.out[m][lane];
}

// Eight 16-bit numbers; every one is exact in double.
__attribute__((always_inline)) inline void widen(Element element, const Halves& halves, Doubles& wide) {
  Words w = __builtin_convertvector(halves, Words);
  if (element == Element::f16) {
    const Words sign = (w & 0x8000u) << 16, magnitude = (w & 0x7FFFu) << 13;
    // The exponent is 112 too small; a product puts subnormals right as well. What was infinite or NaN stays so.
    const Words scaled = (Words)((Floats)magnitude * 0x1p112f);
    w = sign | scaled | ((Words)(magnitude >= 0x0F800000u) & 0x7F800000u);
  } else {
    w <<= 16;
  }
  wide = __builtin_convertvector((Floats)w, Doubles);
}

// Toward zero.
__attribute__((always_inline)) inline void round_to_float(const Doubles& x, Words& rounded) {
  const Floats nearest = __builtin_convertvector(x, Floats);
  const Doubles back = __builtin_convertvector(nearest, Doubles);
  const Doubles size = x < 0 ? -x : x, size_back = back < 0 ? -back : back;
  // One less in the bits is the next smaller magnitude, from infinity the largest finite number.
  rounded = (Words)nearest + __builtin_convertvector(size_back > size, Words);
}

#if defined(__x86_64__)
#define PACKATTN_EMULATOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PACKATTN_EMULATOR_CLONES
#endif

// One mma.m16n8k16 on the registers a = in[0..3], b = in[4..5], d = in[6..9]; writes d = out[0..3]. Exact products,
// sums in double, rounded toward zero once: no better than a tensor core, whose own order of addition is not
// documented.
PACKATTN_EMULATOR_CLONES inline void multiply_16x8x16(Element element, Exchange& exchange) {
  alignas(64) double a[16][16];
  Doubles b[16];
  for (int r = 0; r < 4; ++r) {
    for (int g = 0; g < 8; ++g) {
      Doubles eight;
      widen(element, as<Halves>(&exchange.in[r][4 * g]), eight);
      std::memcpy(&a[g + 8 * (r % 2)][8 * (r / 2)], &eight, sizeof eight);
    }
  }
  for (int r = 0; r < 2; ++r) {
    Halves columns[8];
    for (int g = 0; g < 8; ++g) columns[g] = as<Halves>(&exchange.in[4 + r][4 * g]);
    transpose_8x8(columns);
    for (int k = 0; k < 8; ++k) widen(element, columns[k], b[8 * r + k]);
  }
  constexpr Words kRow0 = {0, 8, 1, 9, 2, 10, 3, 11}, kRow1 = {4, 12, 5, 13, 6, 14, 7, 15};
  constexpr Words kEven = {0, 2, 4, 6, 8, 10, 12, 14}, kOdd = {1, 3, 5, 7, 9, 11, 13, 15};
  for (int half = 0; half < 2; ++half) {
    for (int g = 0; g < 8; g += 2) {  // rows i and i + 1 of d
      const Words even = as<Words>(&exchange.in[6 + 2 * half][4 * g]);
      const Words odd = as<Words>(&exchange.in[7 + 2 * half][4 * g]);
      const int i = g + 8 * half;
      Doubles sum0 = __builtin_convertvector((Floats)__builtin_shuffle(even, odd, kRow0), Doubles);
      Doubles sum1 = __builtin_convertvector((Floats)__builtin_shuffle(even, odd, kRow1), Doubles);
      for (int k = 0; k < 16; ++k) {
        sum0 += a[i][k] * b[k];
        sum1 += a[i + 1][k] * b[k];
      }
      Words row0, row1;
      round_to_float(sum0, row0);
      round_to_float(sum1, row1);
      const Words out_even = __builtin_shuffle(row0, row1, kEven), out_odd = __builtin_shuffle(row0, row1, kOdd);
      std::memcpy(&exchange.out[2 * half][4 * g], &out_even, sizeof out_even);
      std::memcpy(&exchange.out[2 * half + 1][4 * g], &out_odd, sizeof out_odd);
    }
  }
}

#undef PACKATTN_EMULATOR_CLONES

inline void mma_16x8x16(Element element, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site) {
  const int lane = this_thread().lane();
  Exchange& exchange = my_exchange();
  for (int r = 0; r < 4; ++r) exchange.in[r][lane] = a[r];
  exchange.in[4][lane] = b0;
  exchange.in[5][lane] = b1;
  for (int r = 0; r < 4; ++r) exchange.in[6 + r][lane] = __builtin_bit_cast(uint32_t, d[r]);
  meet(kMma + static_cast<int>(element), site, "mma.sync", [element](Warp& warp, Site) {
    ++report().counters.mma;
    multiply_16x8x16(element, warp.exchange);
  });
  for (int r = 0; r < 4; ++r) d[r] = __builtin_bit_cast(float, exchange.out[r][lane]);
}

}  // namespace packattn::emu
