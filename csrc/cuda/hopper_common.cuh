// What the Hopper kernels (sm_90a) share: rings of stages, copies of panels, the ranges of a warpgroup's 64 rows, and
// the way of an accumulator to global memory.
//
// A matrix in shared memory is panels of 64 columns, each of rows of 128 bytes with the 128-byte swizzle, aligned to
// 1024 bytes. An accumulator x of a warpgroup: thread `lane` of warp w has rows 16 w + lane / 4 + 8 r, r = 0, 1, and
// of them columns 8 j + 2 (lane % 4) + i as x[4 j + 2 r + i].
#pragma once
#include <cmath>

#include "attention_forward.cuh"
#include "ptx_sm90.cuh"

namespace packattn::cuda::hopper {

// Use i of a ring, counted over all items, is in stage i % STAGES; the parity of its barriers' phase is that of
// i / STAGES.
template <int STAGES>
struct Ring {
  static_assert((STAGES & (STAGES - 1)) == 0);
  PACKATTN_DEVICE static uint32_t stage(int use) { return static_cast<uint32_t>(use) % STAGES; }
  PACKATTN_DEVICE static uint32_t parity(int use) { return static_cast<uint32_t>(use) / STAGES % 2; }
};

// The same for any number of stages, one use after the other. parity: that of full; empty's is the other.
template <int STAGES>
struct RingPosition {
  uint32_t stage = 0, parity = 0;
  PACKATTN_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

PACKATTN_DEVICE forward::Item first_item(int heads) {
  return {ptx::block_index() / heads, ptx::block_index() % heads * 2};
}

// What one lane alone reads (forward::load_tile takes a warp).
PACKATTN_DEVICE Tile tile_of(const TileTable& table, int index) {
  const int4 v = ptx::load_global(reinterpret_cast<const int4*>(table.tiles + index));
  return {v.x, v.y, v.z, v.w};
}

// Copies ROWS rows of one head, from `row` on, into COLUMNS / 64 panels; rows and columns past the tensor's are zeros.
// The bytes are for others to announce.
template <int COLUMNS, int ROWS>
PACKATTN_DEVICE void request_panels(uint32_t to, const TmaMap* map, uint32_t barrier, int head, int row) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 64; ++i) ptx::tma_load_3d(to + i * ROWS * 128, map, barrier, i * 64, head, row);
}
template <int COLUMNS, int ROWS>
PACKATTN_DEVICE void copy_panels(uint32_t to, const TmaMap* map, uint32_t barrier, int head, int row) {
  ptx::mbarrier_arrive_expect(barrier, ROWS * COLUMNS * 2);
  request_panels<COLUMNS, ROWS>(to, map, barrier, head, row);
}

// Zeroes rows `first` and later of a matrix of ROWS rows that has landed; by one warp, whose fence it needs after it
// (ptx::fence_proxy_async) before wgmma reads.
template <int COLUMNS, int ROWS>
PACKATTN_DEVICE void zero_rows(uint32_t matrix, int first, int lane) {
#pragma unroll
  for (int panel = 0; panel < COLUMNS / 64; ++panel) {
    for (int i = first * 128 + lane * 16; i < ROWS * 128; i += 512) {
      ptx::sts128(matrix + panel * ROWS * 128 + i, uint4{0, 0, 0, 0});
    }
  }
}

// Ranges of the 64 rows of a warpgroup on the other axis, cut to its tile's.
struct GroupRanges {
  int begin[2], end[2];      // of this thread's two rows; 0x7FFFFFFF, 0 where a row sees nothing or is past the tile
  int full_begin, full_end;  // what all rows of the group see: full_begin <= x < full_end, whether or not the range is
                             // empty; 0, 0x7FFFFFFF where the group has no row. The same in all threads of a warp
  int some_begin, some_end;  // with SOME: spans what any row sees; 0x7FFFFFFF, 0 if none does. The same as well

  // All four warps of a group must come to the same wgmma: each reads all 64 rows.
  // row: the group's first in the tile. begin, end: [rows of the axis]. stack: row i of the group is the tile's
  // (row + i) >> stack.
  template <bool SOME = false>
  PACKATTN_DEVICE static GroupRanges load(const int32_t* begin, const int32_t* end, const Tile& tile, int row, int warp,
                                          int lane, int stack = 0) {
    constexpr int kMax = 0x7FFFFFFF;
    GroupRanges x;
    int low[2], high[2];  // of rows lane and lane + 32
    x.full_begin = 0, x.full_end = kMax;
    x.some_begin = kMax, x.some_end = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = (row + i * 32 + lane) >> stack;
      low[i] = kMax;
      high[i] = 0;
      if (own < tile.rows) {
        const int b = ptx::load_global(begin + tile.row + own), e = ptx::load_global(end + tile.row + own);
        const int cut_b = b < tile.begin ? tile.begin : b, cut_e = e > tile.end ? tile.end : e;
        if (cut_b < cut_e) {
          low[i] = cut_b;
          high[i] = cut_e;
        }
        x.full_begin = low[i] > x.full_begin ? low[i] : x.full_begin;
        x.full_end = high[i] < x.full_end ? high[i] : x.full_end;
        x.some_begin = low[i] < x.some_begin ? low[i] : x.some_begin;
        x.some_end = high[i] > x.some_end ? high[i] : x.some_end;
      }
    }
    x.full_begin = ptx::reduce_max(x.full_begin);
    x.full_end = ptx::reduce_min(x.full_end);
    if constexpr (SOME) {
      x.some_begin = ptx::reduce_min(x.some_begin);
      x.some_end = ptx::reduce_max(x.some_end);
    }
    const bool upper = warp % 4 / 2 == 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int from = warp % 2 * 16 + lane / 4 + 8 * r;
      x.begin[r] = ptx::shfl(upper ? low[1] : low[0], from);
      x.end[r] = ptx::shfl(upper ? high[1] : high[0], from);
    }
    return x;
  }
};

// An accumulator as operand A, 16 columns a step.
template <class T, int STEPS>
PACKATTN_DEVICE void pack_operands(uint32_t (&a)[STEPS][4], const float (&x)[STEPS * 8]) {
#pragma unroll
  for (int i = 0; i < STEPS * 4; ++i) a[i / 4][i % 4] = ptx::pack2<T>(x[2 * i], x[2 * i + 1]);
}

// Stores row r of this thread's quad: COLUMNS columns of x times `factor`, or zeros unless `sees`. to: the row's first
// number, aligned to 16 bytes; columns from `columns` on (a multiple of 8) are not stored, nor is anything unless
// `mine`. All lanes of a warp come here.
template <class T, int COLUMNS>
PACKATTN_DEVICE void store_row(uint16_t* to, const float (&x)[COLUMNS / 2], int r, float factor, bool sees, bool mine,
                               int columns, int quad) {
#pragma unroll
  for (int g = 0; g < COLUMNS / 32; ++g) {
    // Lane q of a quad has columns 2q and 2q + 1 of four tiles of 8; a transposition gives it all of tile q.
    uint32_t y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* pair = x + (g * 4 + j) * 4 + r * 2;
      y[j] = sees ? ptx::pack2<T>(pair[0] * factor, pair[1] * factor) : 0u;
    }
#pragma unroll
    for (int b = 1; b <= 2; b *= 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & b) continue;
        const uint32_t got = ptx::shfl_xor(quad & b ? y[j] : y[j + b], b);
        if (quad & b) {
          y[j] = got;
        } else {
          y[j + b] = got;
        }
      }
    }
    if (mine && g * 32 + quad * 8 < columns) {
      ptx::store_global(reinterpret_cast<uint4*>(to + g * 32 + quad * 8), uint4{y[0], y[1], y[2], y[3]});
    }
  }
}

}  // namespace packattn::cuda::hopper
