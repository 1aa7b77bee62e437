// Attention without tensor cores: the tile products that all plain kernels share, and the forward kernel.
// The backward is in attention_plain_backward.cuh.
//
// It serves what the tensor-core kernels do not (float32, head dims over 256, scales that are not positive, GPUs before
// compute capability 8.0), and the tests hold the others against it. All arithmetic is float32, and `expf`, `logf` and
// `tanhf` are the accurate ones.
//
// A block of 256 threads works on a tile of 64 rows by 64 keys, one query head at a time; thread (x, y) of 16 by 16
// keeps 4 by 4 elements of a product in registers:
//
//     S = Q K^T      rows 4y + i, keys x + 16j      operands in shared memory, 32 columns of the head dim at a time
//     O += P V       rows 4y + i, columns 4x + c    P in shared memory, V 64 columns at a time
//
// Eight 16-byte reads feed 64 multiply-adds, without bank conflicts (hence the pitches). The running
// maximum and sum are those of the online softmax (Milakov and Gimelshein 2018). Each block of keys is summed from zero
// and then added to what was before, so rounding grows with the number of blocks, not of keys.
//
// What a row gives depends on its document alone. Tiles lie inside one document (tile_table.cuh) and blocks of keys
// start at the first key of the tile, so a document's sums are made in the same order alone and packed. Keys that a row
// does not see never meet it: their scores are replaced, not weighted by zero, and a block that some row of a thread
// does not see whole is multiplied key by key under the mask. So NaN and infinity go where the mask lets them, no
// further.
//
// An item of work is a tile, a query head and a slice of the output's columns: GROUPS times 64, what the registers
// hold. Wider outputs compute the scores again for each slice.
#pragma once
#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "row_range.cuh"

namespace packattn::cuda::plain {

constexpr int kTile = 64;
constexpr int kThreads = 256;
constexpr int kSide = 16;                // threads along each side of a tile
constexpr int kOwn = kTile / kSide;      // rows, keys and columns of a thread
constexpr int kDepth = 32;               // columns of an operand of S at a time
constexpr int kDepthPitch = kDepth + 4;  // floats from row to row, spread over the banks
constexpr int kWeightPitch = kTile + 4;  // the same for P
constexpr uint32_t kFloat = 4;           // bytes

// Shared memory. The columns of V take the place of the operands of S, which are done with by then.
constexpr uint32_t kOperandA = 0;
constexpr uint32_t kOperandB = kOperandA + kTile * kDepthPitch * kFloat;
constexpr uint32_t kColumns = 0;
constexpr uint32_t kWeights = kOperandB + kTile * kDepthPitch * kFloat;
constexpr uint32_t kRowFacts = kWeights + kTile * kWeightPitch * kFloat;  // the backward's, 16 bytes for each row
constexpr int kForwardShared = static_cast<int>(kRowFacts);
static_assert(kTile * kTile * kFloat <= kWeights);

// Blocks that the registers of a multiprocessor hold, of kernels that keep so many groups of columns.
constexpr int blocks_per_multiprocessor(int groups) { return groups <= 2 ? 2 : 1; }

// ---- elements -------------------------------------------------------------------------------------------------------

template <class T>
using Stored = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

template <class T>
PACKATTN_DEVICE Stored<T>* element(const TensorView& x, int64_t row, int64_t head) {
  return static_cast<Stored<T>*>(x.data) + row * x.row_stride + head * x.head_stride;
}

template <class T>
PACKATTN_DEVICE float load_element(const Stored<T>* p) {
  if constexpr (std::is_same_v<T, float>) {
    return ptx::load_global(p);
  } else {
    return ptx::widen<T>(ptx::load_global(p));
  }
}

template <class T>
PACKATTN_DEVICE void store_element(Stored<T>* p, float value) {
  if constexpr (std::is_same_v<T, float>) {
    ptx::store_global(p, value);
  } else {
    ptx::store_global(p, ptx::narrow<T>(value));
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

struct Place {  // of a thread in a tile
  int x;
  int y;
};
PACKATTN_DEVICE Place place_of_thread() {
  const int thread = static_cast<int>(threadIdx.x);
  return {thread % kSide, thread / kSide};
}

using Block = float[kOwn][kOwn];  // a thread's elements of a 64 by 64 product

PACKATTN_DEVICE void clear(Block& block) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) block[i][j] = 0.f;
  }
}

// Four elements of a row, of which `exist` are there; the others are 0. `aligned`: one load may fetch them.
template <class T>
PACKATTN_DEVICE float4 load_quad(const Stored<T>* from, int exist, bool aligned) {
  if (aligned && exist >= 4) {
    if constexpr (std::is_same_v<T, float>) {
      return ptx::load_global(reinterpret_cast<const float4*>(from));
    } else {
      const uint2 pairs = ptx::load_global(reinterpret_cast<const uint2*>(from));
      const float2 low = ptx::unpack2<T>(pairs.x);
      const float2 high = ptx::unpack2<T>(pairs.y);
      return {low.x, low.y, high.x, high.y};
    }
  }
  return {exist > 0 ? load_element<T>(from) : 0.f, exist > 1 ? load_element<T>(from + 1) : 0.f,
          exist > 2 ? load_element<T>(from + 2) : 0.f, exist > 3 ? load_element<T>(from + 3) : 0.f};
}

// Whether every row and head of x starts where a load of four elements may.
template <class T>
PACKATTN_DEVICE bool is_aligned(const TensorView& x) {
  return reinterpret_cast<uintptr_t>(x.data) % (4 * sizeof(Stored<T>)) == 0 && x.row_stride % 4 == 0 &&
         x.head_stride % 4 == 0;
}

// Rows [row, row + rows) and columns [column, column + COLUMNS) of x to shared memory, as floats PITCH apart. Zero past
// the last of `rows` (at most 64) and past x's last of `columns`: nothing outside of them is read.
template <class T, int COLUMNS, int PITCH>
PACKATTN_DEVICE void load_tile(uint32_t to, const TensorView& x, int head, int64_t row, int rows, int column,
                               int columns) {
  constexpr int kStep = kThreads / (COLUMNS / 4);  // rows that the block loads at once
  constexpr int kBatch = 2;                        // loads on their way before the first is waited for
  const int c = static_cast<int>(threadIdx.x) % (COLUMNS / 4) * 4;
  const int first = static_cast<int>(threadIdx.x) / (COLUMNS / 4);
  const bool aligned = is_aligned<T>(x);
  const Stored<T>* from = element<T>(x, row, head) + column + c;
#pragma unroll 1
  for (int r = first; r < kTile; r += kStep * kBatch) {
    float4 quad[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = r + i * kStep;
      quad[i] = load_quad<T>(from + at * x.row_stride, at < rows ? columns - column - c : 0, aligned);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      ptx::sts128(to + static_cast<uint32_t>((r + i * kStep) * PITCH + c) * kFloat,
                  uint4{ptx::fbits(quad[i].x), ptx::fbits(quad[i].y), ptx::fbits(quad[i].z), ptx::fbits(quad[i].w)});
    }
  }
}

PACKATTN_DEVICE void load4(float (&v)[4], uint32_t address) {
  const float4 loaded = ptx::lds128f(address);
  v[0] = loaded.x, v[1] = loaded.y, v[2] = loaded.z, v[3] = loaded.w;
}

// product = A B^T over `depth` columns. A: a_rows rows of a from a_row, B: likewise; those past them are zero.
template <class T>
PACKATTN_DEVICE void multiply_rows(Block& product, const TensorView& a, int a_head, int64_t a_row, int a_rows,
                                   const TensorView& b, int b_head, int64_t b_row, int b_rows, int depth) {
  const uint32_t shared = ptx::smem_base();
  const Place me = place_of_thread();
  clear(product);
  for (int d = 0; d < depth; d += kDepth) {
    ptx::block_sync();  // what was in shared memory has been used
    load_tile<T, kDepth, kDepthPitch>(shared + kOperandA, a, a_head, a_row, a_rows, d, depth);
    load_tile<T, kDepth, kDepthPitch>(shared + kOperandB, b, b_head, b_row, b_rows, d, depth);
    ptx::block_sync();
#pragma unroll 1
    for (int k = 0; k < kDepth; k += 4) {
      float left[kOwn][4];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        load4(left[i], shared + kOperandA + static_cast<uint32_t>((me.y * kOwn + i) * kDepthPitch + k) * kFloat);
      }
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        float right[4];
        load4(right, shared + kOperandB + static_cast<uint32_t>((me.x + j * kSide) * kDepthPitch + k) * kFloat);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int n = 0; n < 4; ++n) product[i][j] += left[i][n] * right[n];
        }
      }
    }
  }
}

// Writes a thread's elements of a score-like tile to where multiply_columns reads them.
PACKATTN_DEVICE void store_weights(const Block& weights) {
  const Place me = place_of_thread();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      ptx::sts32(ptx::smem_base() + kWeights +
                     static_cast<uint32_t>((me.y * kOwn + i) * kWeightPitch + me.x + j * kSide) * kFloat,
                 ptx::fbits(weights[i][j]));
    }
  }
}

template <bool MASKED, class Visible>
PACKATTN_DEVICE void sum_columns(Block& product, const Visible& visible) {
  const uint32_t shared = ptx::smem_base();
  const Place me = place_of_thread();
#pragma unroll 1
  for (int k = 0; k < kTile; k += 4) {
    float weight[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      load4(weight[i], shared + kWeights + static_cast<uint32_t>((me.y * kOwn + i) * kWeightPitch + k) * kFloat);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float column[kOwn];
      load4(column, shared + kColumns + static_cast<uint32_t>((k + n) * kTile + me.x * kOwn) * kFloat);
      const uint32_t seen = MASKED ? visible(k + n) : 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (MASKED && (seen >> i & 1u) == 0) continue;  // 0 * NaN is NaN: what is not seen is not multiplied
#pragma unroll
        for (int c = 0; c < kOwn; ++c) product[i][c] += weight[i][n] * column[c];
      }
    }
  }
}

// product = W X for 64 columns of x from `column`: W from store_weights, X the rows [row, row + rows) of x. visible(k):
// bit i says whether the thread's row i of W meets row k of X; not asked where `full`.
template <class T, class Visible>
PACKATTN_DEVICE void multiply_columns(Block& product, const TensorView& x, int head, int64_t row, int rows, int column,
                                      int columns, bool full, const Visible& visible) {
  ptx::block_sync();  // what was in shared memory has been used
  load_tile<T, kTile, kTile>(ptx::smem_base() + kColumns, x, head, row, rows, column, columns);
  ptx::block_sync();
  clear(product);
  if (full) {
    sum_columns<false>(product, visible);
  } else {
    sum_columns<true>(product, visible);
  }
}

// Rows 4y + i of the tile, columns column + 4x + c; those past `rows` and `columns` do not exist.
template <class T>
PACKATTN_DEVICE void store_columns(const TensorView& x, int head, int64_t row, int rows, int column, int columns,
                                   const Block& values) {
  const Place me = place_of_thread();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int r = me.y * kOwn + i;
    if (r >= rows) continue;
    Stored<T>* to = element<T>(x, row + r, head);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int at = column + me.x * kOwn + c;
      if (at < columns) store_element<T>(to + at, values[i][c]);
    }
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// What the thread's four rows of a tile see. Rows that see nothing and rows past the tile pretend to see everything:
// the one get zeros in the end, the others are not stored, and neither is a reason to mask.
struct OwnRows {
  int32_t begin[kOwn];
  int32_t end[kOwn];
  uint32_t seeing = 0;  // bit i: the row sees something

  PACKATTN_DEVICE OwnRows(const AttentionForwardParams& p, const Tile& tile) {
    const Place me = place_of_thread();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      begin[i] = 0;
      end[i] = INT_MAX;
      const int r = me.y * kOwn + i;
      if (r >= tile.rows) continue;
      const int64_t row = static_cast<int64_t>(tile.row) + r;
      const RowRange range = RowRange::clamped(ptx::load_global(p.key_begin + row), ptx::load_global(p.key_end + row),
                                               static_cast<int32_t>(p.total_k));
      if (range.empty()) continue;
      begin[i] = range.begin;
      end[i] = range.end;
      seeing |= 1u << i;
    }
  }
  PACKATTN_DEVICE bool sees(int i) const { return (seeing >> i & 1u) != 0; }
  PACKATTN_DEVICE bool visible(int i, int32_t key) const { return begin[i] <= key && key < end[i]; }
  PACKATTN_DEVICE uint32_t visible(int32_t key) const {  // bit i: for row i
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) bits |= visible(i, key) ? 1u << i : 0u;
    return bits;
  }
  // Whether all four see all keys of the block that starts here.
  PACKATTN_DEVICE bool full(int32_t key) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) all = all && begin[i] <= key && key + kTile <= end[i];
    return all;
  }
};

// The score of a product <q, k>, before the mask.
PACKATTN_DEVICE float score_of(const AttentionForwardParams& p, float product) {
  const float s = product * p.scale;
  return p.softcap > 0.f ? p.softcap * tanhf(s / p.softcap) : s;
}

// Over the 16 threads that share rows.
PACKATTN_DEVICE float max_of_row(float v) {
#pragma unroll
  for (int mask = 1; mask < kSide; mask *= 2) v = fmaxf(v, ptx::shfl_xor(v, mask));
  return v;
}
PACKATTN_DEVICE float sum_of_row(float v) {
#pragma unroll
  for (int mask = 1; mask < kSide; mask *= 2) v += ptx::shfl_xor(v, mask);
  return v;
}

// Items of work: (tile * heads + head) * slices + slice, so tiles come in the order of their table.
struct Item {
  Tile tile;
  int head;
  int column;  // first of the slice
};
PACKATTN_DEVICE int64_t count_items(const TileTable& table, int heads, int slices) {
  return static_cast<int64_t>(ptx::load_global(table.count)) * heads * slices;
}
PACKATTN_DEVICE Item item_of(const TileTable& table, int64_t number, int heads, int slices, int slice_columns) {
  const int64_t tile_and_head = number / slices;
  return {ptx::load_global(table.tiles + tile_and_head / heads), static_cast<int>(tile_and_head % heads),
          static_cast<int>(number % slices) * slice_columns};
}
PACKATTN_DEVICE int slices_of(int columns, int slice_columns) { return (columns + slice_columns - 1) / slice_columns; }

// ---- forward --------------------------------------------------------------------------------------------------------

// exp(a - b) where exp(-inf - -inf) means: nothing was there, nothing is left.
PACKATTN_DEVICE float ratio(float a, float b) { return a == -INFINITY ? 0.f : expf(a - b); }

template <class T, int GROUPS>
PACKATTN_DEVICE void forward_item(const ForwardTask& p, const Item& item) {
  const Tile& tile = item.tile;
  const Place me = place_of_thread();
  const int key_head = item.head / (p.heads_q / p.heads_k);
  const OwnRows rows(p, tile);

  Block out[GROUPS];
  float top[kOwn];  // largest score so far
  float sum[kOwn];  // of exp(score - top)
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) clear(out[g]);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    top[i] = -INFINITY;
    sum[i] = 0.f;
  }

  for (int32_t key = tile.begin; key < tile.end; key += kTile) {
    const int keys = tile.end - key < kTile ? tile.end - key : kTile;
    const bool full = rows.full(key);
    Block s;
    multiply_rows<T>(s, p.query, item.head, tile.row, tile.rows, p.key, key_head, key, keys, p.head_dim);
    float rescale[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float highest = top[i];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const bool seen = full || rows.visible(i, key + me.x + j * kSide);
        s[i][j] = seen ? score_of(p, s[i][j]) : -INFINITY;
        highest = fmaxf(highest, s[i][j]);
      }
      highest = max_of_row(highest);
      const float reference = highest == -INFINITY ? 0.f : highest;  // nothing seen so far
      float added = 0.f;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        s[i][j] = expf(s[i][j] - reference);
        added += s[i][j];
      }
      rescale[i] = ratio(top[i], reference);
      sum[i] = sum[i] * rescale[i] + sum_of_row(added);
      top[i] = highest;
    }
    store_weights(s);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int column = item.column + g * kTile;
      if (column >= p.head_dim_v) continue;
      Block block;
      multiply_columns<T>(block, p.value, key_head, key, keys, column, p.head_dim_v, full,
                          [&](int k) { return rows.visible(key + k); });
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) out[g][i][c] = out[g][i][c] * rescale[i] + block[i][c];
      }
    }
  }

  // A sink is one more key, whose value is 0.
  float factor[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    factor[i] = 1.f;
    if (p.sinks != nullptr) {
      const float sink = ptx::load_global(p.sinks + item.head);
      const float highest = fmaxf(top[i], sink);
      // An infinite sink takes all the weight.
      factor[i] = ratio(top[i], highest);
      sum[i] = sum[i] * factor[i] + (sink == highest ? 1.f : expf(sink - highest));
      top[i] = highest;
    }
    factor[i] /= sum[i];
    const int r = me.y * kOwn + i;
    if (me.x == 0 && r < tile.rows && item.column == 0) {
      ptx::store_global(p.lse + item.head * p.total_q + tile.row + r, rows.sees(i) ? top[i] + logf(sum[i]) : -INFINITY);
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int column = item.column + g * kTile;
    if (column >= p.head_dim_v) continue;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) out[g][i][c] = rows.sees(i) ? out[g][i][c] * factor[i] : 0.f;
    }
    store_columns<T>(p.out, item.head, tile.row, tile.rows, column, p.head_dim_v, out[g]);
  }
}

// Blocks take items in turn: number b, b + grid, ...
template <class T, int GROUPS>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(GROUPS)) forward_kernel(ForwardTask task) {
  constexpr int kSliceColumns = GROUPS * kTile;
  const int slices = slices_of(task.head_dim_v, kSliceColumns);
  const int64_t items = count_items(task.tiles, task.heads_q, slices);
  for (int64_t n = blockIdx.x; n < items; n += gridDim.x) {
    forward_item<T, GROUPS>(task, item_of(task.tiles, n, task.heads_q, slices, kSliceColumns));
  }
}

}  // namespace packattn::cuda::plain
