// ldmatrix and mma.sync: 8 x 8 and 16 x 16 x 8 matrices spread over a warp (layouts: csrc/cuda/ptx.cuh).
#pragma once
#include "numbers.h"
#include "warp.h"

namespace packattn::emu {

inline void ldmatrix_x4(uint32_t* r, uint32_t row_address, bool transposed, Site site) {
  meet(transposed ? kLdmatrixTrans : kLdmatrix, site, "ldmatrix", {{&row_address, nullptr, nullptr}, r},
       [transposed, site](Deposit* lanes) {
         Block& block = this_block();
         const int first = this_thread().warp() * 32;
         Counters& counters = report().counters;
         ++counters.ldmatrix;
         for (int m = 0; m < 4; ++m) {
           uint16_t matrix[8][8];
           uint32_t banks = 0;  // groups of four banks: a row of 16 bytes fills one
           for (int i = 0; i < 8; ++i) {
             const uint32_t address = *static_cast<const uint32_t*>(lanes[m * 8 + i].in[0]);
             if (!block.shared.accessible(first + m * 8 + i, address, 16, 16, site, "ldmatrix")) {
               std::memset(matrix[i], 0xFF, 16);
               continue;
             }
             block.shared.on_read(block.order, first + m * 8 + i, address, 16, site);
             std::memcpy(matrix[i], block.shared.at(address), 16);
             const uint32_t bank = 1u << address / 16 % 8;
             counters.bank_conflicts += (banks & bank) != 0;
             banks |= bank;
           }
           for (int l = 0; l < 32; ++l) {
             const int i = l / 4, j = l % 4 * 2;
             const uint32_t low = transposed ? matrix[j][i] : matrix[i][j];
             const uint32_t high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
             static_cast<uint32_t*>(lanes[l].out)[m] = low | high << 16;
           }
         }
       });
}

// d[16][8] += a[16][16] b[8][16]^T. Exact products and sums in double, rounded toward zero once: no better than a
// tensor core, whose own order of addition is not documented.
inline void multiply_16x8x16(float (&d)[16][8], const float (&a)[16][16], const float (&b_transposed)[16][8]) {
  for (int i = 0; i < 16; ++i) {
    double sum[8];
    for (int j = 0; j < 8; ++j) sum[j] = d[i][j];
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) sum[j] += static_cast<double>(a[i][k]) * b_transposed[k][j];
    }
    for (int j = 0; j < 8; ++j) d[i][j] = toward_zero(sum[j]);
  }
}

inline void mma_16x8x16(Element element, float* d, const uint32_t* a, const uint32_t* b, Site site) {
  meet(kMma + static_cast<int>(element), site, "mma.sync", {{a, b, nullptr}, d}, [element](Deposit* lanes) {
    ++report().counters.mma;
    float ma[16][16], mb[16][8], md[16][8];
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      const auto* pa = static_cast<const uint32_t*>(lanes[l].in[0]);
      const auto* pb = static_cast<const uint32_t*>(lanes[l].in[1]);
      const auto* pd = static_cast<const float*>(lanes[l].out);
      for (int h = 0; h < 2; ++h) {
        for (int r = 0; r < 4; ++r) {
          ma[g + 8 * (r % 2)][t + 8 * (r / 2) + h] = widen(element, static_cast<uint16_t>(pa[r] >> 16 * h));
        }
        for (int r = 0; r < 2; ++r) mb[t + 8 * r + h][g] = widen(element, static_cast<uint16_t>(pb[r] >> 16 * h));
        md[g][t + h] = pd[h];
        md[g + 8][t + h] = pd[2 + h];
      }
    }
    multiply_16x8x16(md, ma, mb);
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      auto* pd = static_cast<float*>(lanes[l].out);
      for (int h = 0; h < 2; ++h) {
        pd[h] = md[g][t + h];
        pd[2 + h] = md[g + 8][t + h];
      }
    }
  });
}

}  // namespace packattn::emu
