// Backward of the plain kernels (attention_plain.cuh). With P = exp(S - lse) and delta = sum(dout * out) - dlse (Dao et
// al. 2022, appendix B.2; the gradient of lse moves only delta):
//
//     dP = dO V^T      dS = P * (dP - delta) * (1 - tanh^2 under a soft cap)
//     dQ = scale dS K      dK = scale dS^T Q      dV = P^T dO      dsink = -sum exp(sink - lse) delta
//
// Four kernels: delta, one warp for each row and head; dQ, a tile of rows against the keys that it sees; dK and dV, a
// tile of keys against the rows that see it, all query heads of its group in turn; dsinks, a block for each head. Every
// sum has one owner and one order: no atomics, the same bits in every run.
#pragma once
#include "attention_plain.cuh"
#include "scan.cuh"

namespace packattn::cuda::plain {

constexpr int kBackwardShared = static_cast<int>(kRowFacts + kTile * 16);

struct PlainBackwardTask : BackwardTask {
  float* delta = nullptr;  // [Hq, Tq]
};

// ---- delta and dsinks -----------------------------------------------------------------------------------------------

PACKATTN_DEVICE bool sees_anything(const AttentionForwardParams& p, int64_t row) {
  return !RowRange::clamped(ptx::load_global(p.key_begin + row), ptx::load_global(p.key_end + row),
                            static_cast<int32_t>(p.total_k))
              .empty();
}

template <class T>
__global__ void __launch_bounds__(kThreads) delta_kernel(PlainBackwardTask p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t rows = p.total_q * p.heads_q;
  for (int64_t n = (static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x)) / kWarp; n < rows;
       n += warps) {
    const int64_t row = n / p.heads_q;
    const int head = static_cast<int>(n % p.heads_q);
    const Stored<T>* out = element<T>(p.out, row, head);
    const Stored<T>* dout = element<T>(p.dout, row, head);
    float sum = 0.f;
    for (int d = lane; d < p.head_dim_v; d += kWarp) sum += load_element<T>(out + d) * load_element<T>(dout + d);
#pragma unroll
    for (int mask = 1; mask < kWarp; mask *= 2) sum += ptx::shfl_xor(sum, mask);
    if (lane != 0) continue;
    const int64_t at = head * p.total_q + row;
    if (p.dlse != nullptr) sum -= ptx::load_global(p.dlse + at);
    ptx::store_global(p.delta + at, sum);
  }
}

struct DoubleSum {  // a head's rows may be many
  double value;
  PACKATTN_DEVICE static DoubleSum identity() { return {0.0}; }
  PACKATTN_DEVICE DoubleSum then(const DoubleSum& next) const { return {value + next.value}; }
};

__global__ void __launch_bounds__(kThreads) dsinks_kernel(PlainBackwardTask p) {
  const int head = static_cast<int>(blockIdx.x);
  const float sink = ptx::load_global(p.sinks + head);
  DoubleSum own = DoubleSum::identity();
  for (int64_t row = threadIdx.x; row < p.total_q; row += kThreads) {
    if (!sees_anything(p, row)) continue;
    const int64_t at = head * p.total_q + row;
    own.value += expf(sink - ptx::load_global(p.lse + at)) * ptx::load_global(p.delta + at);
  }
  const double total = block_scan(own, ptx::smem_base()).total.value;
  if (threadIdx.x == 0) ptx::store_global(p.dsinks + head, static_cast<float>(0.0 - total));
}

// ---- scores once more -----------------------------------------------------------------------------------------------

struct Gradients {
  float probability;
  float score;  // dS without the scale
};

// Of one visible pair, from <q, k> and dP. A probability is at most 1, whatever rounding makes of huge scores.
PACKATTN_DEVICE Gradients gradients_of(const AttentionForwardParams& p, float product, float dp, float lse,
                                       float delta) {
  float score = product * p.scale;
  float slope = 1.f;
  if (p.softcap > 0.f) {
    const float t = tanhf(score / p.softcap);
    score = p.softcap * t;
    slope = 1.f - t * t;
  }
  const float exponent = score - lse;
  const float probability = expf(exponent > 0.f ? 0.f : exponent);
  return {probability, probability * (dp - delta) * slope};
}

PACKATTN_DEVICE void scale_by(Block& block, float factor) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) block[i][j] *= factor;
  }
}

PACKATTN_DEVICE void add(Block& to, const Block& block) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) to[i][j] += block[i][j];
  }
}

// ---- dQ -------------------------------------------------------------------------------------------------------------

template <class T, int GROUPS>
PACKATTN_DEVICE void dquery_item(const PlainBackwardTask& p, const Item& item) {
  const Tile& tile = item.tile;
  const Place me = place_of_thread();
  const int key_head = item.head / (p.heads_q / p.heads_k);
  const OwnRows rows(p, tile);
  float lse[kOwn];
  float delta[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int64_t at = item.head * p.total_q + tile.row + me.y * kOwn + i;
    lse[i] = rows.sees(i) ? ptx::load_global(p.lse + at) : INFINITY;
    delta[i] = rows.sees(i) ? ptx::load_global(p.delta + at) : 0.f;
  }
  Block dquery[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) clear(dquery[g]);

  for (int32_t key = tile.begin; key < tile.end; key += kTile) {
    const int keys = tile.end - key < kTile ? tile.end - key : kTile;
    const bool full = rows.full(key);
    Block s;
    Block dp;
    multiply_rows<T>(s, p.query, item.head, tile.row, tile.rows, p.key, key_head, key, keys, p.head_dim);
    multiply_rows<T>(dp, p.dout, item.head, tile.row, tile.rows, p.value, key_head, key, keys, p.head_dim_v);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const bool seen = full || rows.visible(i, key + me.x + j * kSide);
        s[i][j] = seen ? gradients_of(p, s[i][j], dp[i][j], lse[i], delta[i]).score : 0.f;
      }
    }
    store_weights(s);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int column = item.column + g * kTile;
      if (column >= p.head_dim) continue;
      Block block;
      multiply_columns<T>(block, p.key, key_head, key, keys, column, p.head_dim, full,
                          [&](int k) { return rows.visible(key + k); });
      add(dquery[g], block);
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int column = item.column + g * kTile;
    if (column >= p.head_dim) continue;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) dquery[g][i][c] = rows.sees(i) ? dquery[g][i][c] * p.scale : 0.f;
    }
    store_columns<T>(p.dquery, item.head, tile.row, tile.rows, column, p.head_dim, dquery[g]);
  }
}

template <class T, int GROUPS>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(GROUPS)) dquery_kernel(PlainBackwardTask task) {
  constexpr int kSliceColumns = GROUPS * kTile;
  const int slices = slices_of(task.head_dim, kSliceColumns);
  const int64_t items = count_items(task.query_tiles, task.heads_q, slices);
  for (int64_t n = blockIdx.x; n < items; n += gridDim.x) {
    dquery_item<T, GROUPS>(task, item_of(task.query_tiles, n, task.heads_q, slices, kSliceColumns));
  }
}

// ---- dK and dV ------------------------------------------------------------------------------------------------------

// A row of the block of query rows that a tile of keys meets, in shared memory.
struct RowFacts {
  int32_t begin;
  int32_t end;
  float lse;
  float delta;
};

PACKATTN_DEVICE uint32_t address_of_facts(int row) {
  return ptx::smem_base() + kRowFacts + static_cast<uint32_t>(row * static_cast<int>(sizeof(RowFacts)));
}

// Rows past the last see nothing, like others that see nothing: what either holds may be anything.
PACKATTN_DEVICE void store_facts(const PlainBackwardTask& p, int head, int32_t first, int rows) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kTile) return;
  RowFacts facts{INT_MAX, 0, INFINITY, 0.f};
  if (r < rows) {
    const int64_t row = static_cast<int64_t>(first) + r;
    const RowRange range = RowRange::clamped(ptx::load_global(p.key_begin + row), ptx::load_global(p.key_end + row),
                                             static_cast<int32_t>(p.total_k));
    const int64_t at = head * p.total_q + row;
    facts = {range.begin, range.end, ptx::load_global(p.lse + at), ptx::load_global(p.delta + at)};
  }
  store_shared(address_of_facts(r), facts);
}

// The tile's product is transposed here: keys 4y + i, query rows x + 16j.
template <class T, int GROUPS>
PACKATTN_DEVICE void dkey_item(const PlainBackwardTask& p, const Item& item) {
  const Tile& tile = item.tile;
  const Place me = place_of_thread();
  const int group = p.heads_q / p.heads_k;
  const int32_t first_key = tile.row + me.y * kOwn;  // of the thread
  const int own_keys = tile.rows - me.y * kOwn;      // how many of its four exist, if positive

  Block dkey[GROUPS];
  Block dvalue[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    clear(dkey[g]);
    clear(dvalue[g]);
  }
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    for (int32_t row = tile.begin; row < tile.end; row += kTile) {
      const int rows = tile.end - row < kTile ? tile.end - row : kTile;
      ptx::block_sync();  // the facts of the rows before have been used
      store_facts(p, head, row, rows);
      Block s;
      Block dp;
      multiply_rows<T>(s, p.key, item.head, tile.row, tile.rows, p.query, head, row, rows, p.head_dim);
      multiply_rows<T>(dp, p.value, item.head, tile.row, tile.rows, p.dout, head, row, rows, p.head_dim_v);
      bool all_seen = true;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const RowFacts facts = load_shared<RowFacts>(address_of_facts(me.x + j * kSide));
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int32_t key = first_key + i;
          const bool seen = facts.begin <= key && key < facts.end;
          const Gradients gradients = gradients_of(p, s[i][j], dp[i][j], facts.lse, facts.delta);
          s[i][j] = seen ? gradients.probability : 0.f;
          dp[i][j] = seen ? gradients.score : 0.f;
          all_seen = all_seen && (seen || i >= own_keys || me.x + j * kSide >= rows);
        }
      }
      // Whether all rows see the thread's keys: the 16 threads of a half warp have them all. Rows past the last are no
      // reason to mask, as their weights are 0 and their columns zero-filled; nor are keys past the last.
      const int half = static_cast<int>(threadIdx.x) % kWarp / kSide * kSide;
      const bool full = (ptx::ballot(all_seen) >> half & 0xFFFFu) == 0xFFFFu;
      const auto visible = [&](int k) {
        const float2 range = ptx::lds64(address_of_facts(k));
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int32_t key = first_key + i;
          bits |= ptx::fint(range.x) <= key && key < ptx::fint(range.y) ? 1u << i : 0u;
        }
        return bits;
      };
      Block block;
      store_weights(s);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int column = item.column + g * kTile;
        if (column >= p.head_dim_v) continue;
        multiply_columns<T>(block, p.dout, head, row, rows, column, p.head_dim_v, full, visible);
        add(dvalue[g], block);
      }
      ptx::block_sync();  // P has been used
      store_weights(dp);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int column = item.column + g * kTile;
        if (column >= p.head_dim) continue;
        multiply_columns<T>(block, p.query, head, row, rows, column, p.head_dim, full, visible);
        add(dkey[g], block);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int column = item.column + g * kTile;
    scale_by(dkey[g], p.scale);
    store_columns<T>(p.dkey, item.head, tile.row, tile.rows, column, p.head_dim, dkey[g]);
    store_columns<T>(p.dvalue, item.head, tile.row, tile.rows, column, p.head_dim_v, dvalue[g]);
  }
}

template <class T, int GROUPS>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(2 * GROUPS)) dkey_kernel(PlainBackwardTask task) {
  constexpr int kSliceColumns = GROUPS * kTile;
  const int columns = task.head_dim > task.head_dim_v ? task.head_dim : task.head_dim_v;
  const int slices = slices_of(columns, kSliceColumns);
  const int64_t items = count_items(task.key_tiles, task.heads_k, slices);
  for (int64_t n = blockIdx.x; n < items; n += gridDim.x) {
    dkey_item<T, GROUPS>(task, item_of(task.key_tiles, n, task.heads_k, slices, kSliceColumns));
  }
}

}  // namespace packattn::cuda::plain
