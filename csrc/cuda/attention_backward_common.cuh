// What the two large kernels of the backward share: scores to gradients of scores, and operands handed between warps.
#pragma once
#include "kernels.h"
#include "mma_tile.cuh"

namespace packattn::cuda::backward {

// Scores in units of log2 e, so that exp(score - lse) = 2^(x - lse * log2 e): x = factor * <q, k>, or with a soft cap
// x = factor * tanh(inner * <q, k>) where tile::tanh_scaled wants its argument scaled.
struct ScoreScale {
  float factor;
  float inner;
};

template <bool SOFTCAP>
PACKATTN_DEVICE ScoreScale score_scale(const BackwardTask& task) {
  if constexpr (SOFTCAP) return {tile::kLog2e * task.softcap, 2.f * tile::kLog2e * (task.scale / task.softcap)};
  return {tile::kLog2e * task.scale, 0.f};
}

// s: <q, k> becomes the probability; dp: <dout, v> becomes (dp - delta) times the derivative of the soft cap, so that
// dS = s * dp. stats: {lse * log2 e, delta} of the element's query.
template <bool SOFTCAP>
PACKATTN_DEVICE void weigh(float& s, float& dp, const ScoreScale& scale, float2 stats) {
  dp -= stats.y;
  if constexpr (SOFTCAP) {
    const float t = tile::tanh_scaled(s * scale.inner);
    s = ptx::ex2(t * scale.factor - stats.x);
    dp *= 1.f - t * t;
  } else {
    s = ptx::ex2(s * scale.factor - stats.x);
  }
}

// MT x KS operand blocks as one warp holds them, in shared memory: lane by lane, 16 bytes each, 512 bytes a block.
template <int MT, int KS>
PACKATTN_DEVICE void put_operands(uint32_t to, const uint32_t (&a)[MT][KS][4], int lane) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
      ptx::sts128(to + (m * KS + ks) * 512 + lane * 16, uint4{a[m][ks][0], a[m][ks][1], a[m][ks][2], a[m][ks][3]});
    }
  }
}
template <int MT, int KS>
PACKATTN_DEVICE void get_operands(uint32_t (&a)[MT][KS][4], uint32_t from, int lane) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
      const uint4 x = ptx::lds128(from + (m * KS + ks) * 512 + lane * 16);
      a[m][ks][0] = x.x, a[m][ks][1] = x.y, a[m][ks][2] = x.z, a[m][ks][3] = x.w;
    }
  }
}

// Rows of x that are seen by nobody (or see nobody) become 0, also where the other operand was not finite.
template <int MT, int NT>
PACKATTN_DEVICE void clear_empty_rows(float (&x)[MT][NT][4], uint32_t ranges, int lane) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 range = ptx::lds64(ranges + (m * 16 + lane / 4 + 8 * r) * 8);
      if (ptx::fint(range.x) < ptx::fint(range.y)) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) x[m][n][2 * r] = x[m][n][2 * r + 1] = 0.f;
    }
  }
}

// The same value in every lane, told to the compiler: it then lives in a register that the warp's lanes share.
PACKATTN_DEVICE int uniform(int value) { return ptx::reduce_min(value); }

// Calls body(tile, head) for this block's share of tiles x heads. Items are numbered with the heads of a tile side by
// side; block b takes items b, b + grid, ...
template <class Body>
PACKATTN_DEVICE void for_each_item(const TileTable& table, int heads, const Body& body) {
  uint32_t index = blockIdx.x / heads;
  int head = static_cast<int>(blockIdx.x % heads);
  while (index < static_cast<uint32_t>(ptx::load_global(table.count))) {
    const Tile* at = table.tiles + index;
    body(Tile{uniform(ptx::load_global(&at->row)), uniform(ptx::load_global(&at->rows)),
              uniform(ptx::load_global(&at->begin)), uniform(ptx::load_global(&at->end))},
         head);
    index += gridDim.x / heads;
    head += static_cast<int>(gridDim.x % heads);
    if (head >= heads) ++index, head -= heads;
  }
}

}  // namespace packattn::cuda::backward
