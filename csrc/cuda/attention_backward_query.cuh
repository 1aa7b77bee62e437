// Gradient of query on tensor cores (mma.sync, sm_80 and later).
//
//   dQ = scale dS K,   dS = P * (dO V^T - delta)     (attention_backward.cuh; Dao et al., 2022, appendix B.2)
//
// The scores are computed a second time, with query rows as the rows of the product: a block keeps a tile of query rows
// of one head and walks over the keys that they see. Two more products than a single pass has, but no gradient is ever
// summed in global memory: no atomics, no float32 copy of dQ, no order among blocks. Warps and SPLIT: as for the keys.
#pragma once
#include <cmath>

#include "attention_backward_common.cuh"

namespace packattn::cuda {

// D, DV: columns of the instantiation. SPLIT: warps that share rows. MT: blocks of 16 rows that a warp has. KEYS: keys
// loaded at a time; SLICE: those worked on at a time. STAGES: buffers of keys. QREG, OREG: query and dout stay in
// registers as operands. BLOCKS: blocks on a multiprocessor.
template <class T_, int D_, int DV_, int WARPS, int SPLIT_, int MT_, int KEYS_, int SLICE_, int STAGES_, bool QREG,
          bool OREG, int BLOCKS>
struct BackwardQueryShape {
  using T = T_;
  static constexpr int D = D_, DV = DV_, SPLIT = SPLIT_, MT = MT_, KEYS = KEYS_, SLICE = SLICE_, STAGES = STAGES_;
  static constexpr bool kQueryInRegisters = QREG, kDoutInRegisters = OREG;
  static constexpr int kBlocks = BLOCKS, kThreads = WARPS * 32;
  static constexpr int kWarpRows = MT * 16, kRows = WARPS / SPLIT * kWarpRows;
  static constexpr int kPart = SLICE / SPLIT;                                      // keys whose scores a warp computes
  static constexpr int kColumns = D / SPLIT;                                       // columns of dQ that a warp sums
  static constexpr int kExchangeBytes = SPLIT == 1 ? 0 : MT * (kPart / 16) * 512;  // dS of one warp
  // Shared memory, in bytes.
  static constexpr int kQuery = 0, kDout = kQuery + tile::matrix_bytes(kRows, D);
  static constexpr int kKey = kDout + tile::matrix_bytes(kRows, DV), kKeyBytes = tile::matrix_bytes(KEYS, D);
  static constexpr int kValue = kKey + STAGES * kKeyBytes, kValueBytes = tile::matrix_bytes(KEYS, DV);
  static constexpr int kRanges = kValue + STAGES * kValueBytes;
  static constexpr int kExchange = kRanges + WARPS * kWarpRows * 8;
  static constexpr int kSharedBytes = kExchange + WARPS * kExchangeBytes;
  static_assert(KEYS % SLICE == 0 && kPart % 16 == 0);
  static_assert((SPLIT & (SPLIT - 1)) == 0);
  static_assert(SPLIT == 1 || kColumns % 64 == 0);  // what the swizzle permutes stays whole
};

namespace backward {

// One tile of query rows and one query head.
template <class S, bool SOFTCAP>
PACKATTN_DEVICE void query_tile(const BackwardTask& task, const Tile& rows, int head) {
  using T = typename S::T;
  constexpr int D = S::D, DV = S::DV, SPLIT = S::SPLIT, MT = S::MT, KEYS = S::KEYS, SLICE = S::SLICE;
  constexpr int NT = S::kPart / 8;
  const int thread = ptx::thread_index(), lane = thread % 32, warp = uniform(thread / 32);
  const int group = warp / SPLIT, part = warp & (SPLIT - 1);
  const int own = group * S::kWarpRows;  // this warp's first row in the tile
  const uint32_t base = ptx::smem_base();
  const int key_head = head / (task.heads_q / task.heads_k);

  ptx::block_sync();  // B0: the tile before this one is done with shared memory
  {
    tile::Source query = tile::source_at<D>(task.query.data, task.query.row_stride, task.query.head_stride, head,
                                            rows.row, task.head_dim, thread);
    tile::copy_rows<D, S::kRows, S::kThreads>(base + S::kQuery, query, rows.rows);
    tile::Source dout = tile::source_at<DV>(task.dout.data, task.dout.row_stride, task.dout.head_stride, head, rows.row,
                                            task.head_dim_v, thread);
    tile::copy_rows<DV, S::kRows, S::kThreads>(base + S::kDout, dout, rows.rows);
  }
  ptx::cp_async_commit();
  // Where the next keys are copied from. With WALK addresses move on with the keys, which saves instructions; else they
  // are worked out anew for every copy, which saves registers: at 192 columns none is left.
  constexpr bool WALK = D != 192;
  tile::Source key, value;
  const auto seek = [&](int row) {
    const int thread = ptx::thread_index();
    key = tile::source_at<D>(task.key.data, task.key.row_stride, task.key.head_stride, key_head, row, task.head_dim,
                             thread);
    value = tile::source_at<DV>(task.value.data, task.value.row_stride, task.value.head_stride, key_head, row,
                                task.head_dim_v, thread);
  };
  if constexpr (WALK) {
    seek(rows.begin);
    ptx::hold(key.to);
    ptx::hold(value.to);
  }
  // Copies KEYS keys. Those at or past the range of the tile may belong to another document: zeros.
  const auto fetch = [&](int buffer, int row) {
    if constexpr (!WALK) seek(row);
    tile::copy_rows<D, KEYS, S::kThreads>(base + S::kKey + buffer * S::kKeyBytes, key, rows.end - row);
    tile::copy_rows<DV, KEYS, S::kThreads>(base + S::kValue + buffer * S::kValueBytes, value, rows.end - row);
    if constexpr (WALK) {
      ptx::hold(key.next);
      ptx::hold(value.next);
    }
  };
  if (rows.begin < rows.end) fetch(0, rows.begin);
  ptx::cp_async_commit();
  const uint32_t ranges = base + S::kRanges + warp * S::kWarpRows * 8;
  const tile::Span span =
      tile::load_ranges<S::kWarpRows>(ranges, task.key_begin + rows.row + own, task.key_end + rows.row + own,
                                      rows.rows - own, rows.begin, rows.end, lane);
  float2 stats[MT][2];  // lse * log2 e, delta
  {
    const float2* from = static_cast<const float2*>(task.scratch) + head * task.total_q + rows.row;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = own + m * 16 + lane / 4 + 8 * r;
        stats[m][r] = row < rows.rows ? ptx::load_global(from + row) : float2{INFINITY, 0.f};
      }
    }
  }
  ptx::cp_async_wait<1>();
  ptx::block_sync();  // B1: query, dout and ranges are there

  const uint32_t query_a = base + S::kQuery + own * D * 2 + tile::lane_a<D>(lane);
  const uint32_t dout_a = base + S::kDout + own * DV * 2 + tile::lane_a<DV>(lane);
  uint32_t qf[S::kQueryInRegisters ? MT : 1][D / 16][4], of[S::kDoutInRegisters ? MT : 1][DV / 16][4];
  if constexpr (S::kQueryInRegisters) tile::load_a<D>(qf, query_a);
  if constexpr (S::kDoutInRegisters) tile::load_a<DV>(of, dout_a);
  float dq[MT][S::kColumns / 8][4];
  tile::zero(dq);
  const ScoreScale scale = score_scale<SOFTCAP>(task);

  int buffer = 0;
  for (int row = rows.begin; row < rows.end; row += KEYS) {
    ptx::cp_async_wait<0>();
    ptx::block_sync();  // B2: these keys are there; all warps are done with the other buffer
    if constexpr (S::STAGES > 1) {
      if (row + KEYS < rows.end) fetch(buffer ^ 1, row + KEYS);
      ptx::cp_async_commit();
    }
#pragma unroll 1
    for (int at = 0; at < KEYS; at += SLICE) {
      const int slice = row + at, mine = slice + part * S::kPart;  // first key: of the slice, of this warp's scores
      if (slice + SLICE <= span.some_begin || slice >= span.some_end) continue;
      const uint32_t keys = base + S::kKey + buffer * S::kKeyBytes;
      const uint32_t values = base + S::kValue + buffer * S::kValueBytes;
      const int from = at + part * S::kPart;
      float s[MT][NT][4], dp[MT][NT][4];
      tile::zero(s);
      if constexpr (S::kQueryInRegisters) {
        tile::multiply_rows<T, D>(s, qf, keys + from * D * 2 + tile::lane_b<D>(lane));
      } else {
        tile::multiply_rows<T, D, D / 16>(s, query_a, keys + from * D * 2 + tile::lane_b<D>(lane));
      }
      tile::zero(dp);
      if constexpr (S::kDoutInRegisters) {
        tile::multiply_rows<T, DV>(dp, of, values + from * DV * 2 + tile::lane_b<DV>(lane));
      } else {
        tile::multiply_rows<T, DV, DV / 16>(dp, dout_a, values + from * DV * 2 + tile::lane_b<DV>(lane));
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            weigh<SOFTCAP>(s[m][n][j], dp[m][n][j], scale, stats[m][j / 2]);
            dp[m][n][j] *= s[m][n][j];
          }
        }
      }
      // A weight that is masked may have overflowed: selected away, not multiplied by 0.
      if (!(mine >= span.full_begin && mine + S::kPart <= span.full_end)) tile::mask(dp, ranges, mine, 0.f, lane);
      const uint32_t key_b = keys + part * S::kColumns * 2 + tile::lane_a<D>(lane);
      uint32_t ds[MT][NT / 2][4];
      tile::as_operand<T>(ds, dp);
      if constexpr (SPLIT > 1) {
        if (at > 0) ptx::named_sync(1 + group, SPLIT * 32);  // B3: the others are done with the slice before
        put_operands(base + S::kExchange + warp * S::kExchangeBytes, ds, lane);
      }
      tile::multiply_columns<T, D>(dq, ds, key_b + from * D * 2);
      if constexpr (SPLIT > 1) {
        ptx::named_sync(1 + group, SPLIT * 32);  // B4: the others' weights are there
#pragma unroll
        for (int i = 1; i < SPLIT; ++i) {
          const int other = (part + i) & (SPLIT - 1);
          get_operands(ds, base + S::kExchange + (group * SPLIT + other) * S::kExchangeBytes, lane);
          tile::multiply_columns<T, D>(dq, ds, key_b + (at + other * S::kPart) * D * 2);
        }
      }
    }
    if constexpr (S::STAGES > 1) {
      buffer ^= 1;
    } else {
      ptx::block_sync();  // B5: all warps are done with the one buffer
      if (row + KEYS < rows.end) fetch(0, row + KEYS);
      ptx::cp_async_commit();
    }
  }
  ptx::cp_async_wait<0>();

  // Through this warp's rows and columns of the query, which nobody reads any more.
  if constexpr (SPLIT > 1) ptx::named_sync(1 + group, SPLIT * 32);  // B6
  clear_empty_rows(dq, ranges, lane);
  tile::store_rows<T, D>(dq, task.scale, base + S::kQuery + own * D * 2 + part * S::kColumns * 2,
                         static_cast<uint16_t*>(task.dquery.data) + (rows.row + own) * task.dquery.row_stride +
                             head * task.dquery.head_stride + part * S::kColumns,
                         task.dquery.row_stride, rows.rows - own, task.head_dim - part * S::kColumns, lane);
}

}  // namespace backward

// Grid: any number of blocks. Reads the row statistics in task.scratch; writes all of dquery.
template <class S, bool SOFTCAP>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) attention_backward_query(BackwardTask task) {
  backward::for_each_item(task.query_tiles, task.heads_q,
                          [&](const Tile& rows, int head) { backward::query_tile<S, SOFTCAP>(task, rows, head); });
}

}  // namespace packattn::cuda
