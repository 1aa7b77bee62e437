// Gradients of key and value on tensor cores (mma.sync, sm_80 and later).
//
// With P = exp(score - lse) and delta = rowsum(dout * out) - dlse (attention_backward_stats.cuh):
//   dV = P^T dO,   dS = P * (dO V^T - delta),   dK = scale dS^T Q     (Dao et al., FlashAttention, 2022, appendix B.2)
// A block keeps a tile of keys and walks over the query rows that see them, for every query head of the group. Scores
// are computed transposed, keys as the rows of the product, so that a warp owns its keys for all queries: P^T and dS^T
// become operands of the second products without leaving the registers, and no sum is shared between warps. Where two
// outputs of head_dim columns are too many for the registers or make one operand read serve too few products, SPLIT
// warps share their keys: each computes the scores of its part of the queries, the weights go to the others through
// shared memory as operands, and each warp sums its part of the columns.
//
// Every sum runs in one order, which depends on the tile alone (head by head, queries from the first that sees the
// tile): no atomics, and the same bits whatever stands next to a document.
#pragma once
#include "attention_backward_common.cuh"

namespace packattn::cuda {

// D, DV: columns of the instantiation. SPLIT: warps that share keys. MT: blocks of 16 keys that a warp has. ROWS: query
// rows loaded at a time; SLICE: those worked on at a time. STAGES: buffers of query rows. KREG: how many of the
// D / 16 steps of the keys stay in registers as operands (none with a soft cap, which needs the registers); VREG:
// whether the values do. BLOCKS: blocks on a multiprocessor.
template <class T_, int D_, int DV_, int WARPS, int SPLIT_, int MT_, int ROWS_, int SLICE_, int STAGES_, int KREG,
          bool VREG, int BLOCKS>
struct BackwardKeyShape {
  using T = T_;
  static constexpr int D = D_, DV = DV_, SPLIT = SPLIT_, MT = MT_, ROWS = ROWS_, SLICE = SLICE_, STAGES = STAGES_;
  static constexpr bool kValueInRegisters = VREG;
  static constexpr int kKeySteps = KREG;
  static constexpr int kBlocks = BLOCKS, kThreads = WARPS * 32;
  static constexpr int kWarpKeys = MT * 16, kKeys = WARPS / SPLIT * kWarpKeys;
  static constexpr int kPart = SLICE / SPLIT;                         // queries whose scores a warp computes
  static constexpr int kColumns = D / SPLIT, kColumnsV = DV / SPLIT;  // columns of dK and dV that a warp sums
  static constexpr int kExchangeBytes = SPLIT == 1 ? 0 : 2 * MT * (kPart / 16) * 512;  // P and dS of one warp
  // Shared memory, in bytes.
  static constexpr int kKey = 0, kValue = kKey + tile::matrix_bytes(kKeys, D);
  static constexpr int kQuery = kValue + tile::matrix_bytes(kKeys, DV), kQueryBytes = tile::matrix_bytes(ROWS, D);
  static constexpr int kDout = kQuery + STAGES * kQueryBytes, kDoutBytes = tile::matrix_bytes(ROWS, DV);
  static constexpr int kStats = kDout + STAGES * kDoutBytes, kRanges = kStats + STAGES * ROWS * 8;
  static constexpr int kExchange = kRanges + WARPS * kWarpKeys * 8, kSharedBytes = kExchange + WARPS * kExchangeBytes;
  static_assert(ROWS % SLICE == 0 && kPart % 16 == 0 && ROWS <= kThreads);
  static_assert((SPLIT & (SPLIT - 1)) == 0);
  static_assert(KREG == 0 || KREG + 1 == D / 16 || KREG == D / 16);  // the rest starts where column steps count from
  static_assert(SPLIT == 1 || (kColumns % 64 == 0 && kColumnsV % 64 == 0));  // what the swizzle permutes stays whole
};

namespace backward {

// One tile of keys and one key head.
template <class S, bool SOFTCAP>
PACKATTN_DEVICE void key_tile(const BackwardTask& task, const Tile& keys, int head) {
  using T = typename S::T;
  constexpr int D = S::D, DV = S::DV, SPLIT = S::SPLIT, MT = S::MT, ROWS = S::ROWS;
  // A soft cap needs registers of its own: slices are halved where that leaves whole operands, keys are read again.
  constexpr int SLICE = SOFTCAP && S::kPart >= 32 ? S::SLICE / 2 : S::SLICE, PART = SLICE / SPLIT, NT = PART / 8;
  constexpr int KEY_STEPS = SOFTCAP ? 0 : S::kKeySteps;  // of 16 columns, in registers
  const int thread = ptx::thread_index(), lane = thread % 32, warp = uniform(thread / 32);
  const int group = warp / SPLIT, part = warp & (SPLIT - 1);
  const int own = group * S::kWarpKeys;  // this warp's first key in the tile
  const uint32_t base = ptx::smem_base();
  const int heads = task.heads_q / task.heads_k, first_head = head * heads;
  const int past_head = keys.begin < keys.end ? first_head + heads : first_head;

  ptx::block_sync();  // B0: the tile before this one is done with shared memory
  {
    tile::Source key = tile::source_at<D>(task.key.data, task.key.row_stride, task.key.head_stride, head, keys.row,
                                          task.head_dim, thread);
    tile::copy_rows<D, S::kKeys, S::kThreads>(base + S::kKey, key, keys.rows);
    tile::Source value = tile::source_at<DV>(task.value.data, task.value.row_stride, task.value.head_stride, head,
                                             keys.row, task.head_dim_v, thread);
    tile::copy_rows<DV, S::kKeys, S::kThreads>(base + S::kValue, value, keys.rows);
  }
  ptx::cp_async_commit();
  // Where the next rows are copied from. With WALK addresses move on with the rows, which saves instructions; else they
  // are worked out anew for every copy, which saves registers: where ptxas would spill some.
  constexpr bool WALK = (D == 64 || SPLIT > 1) && !SOFTCAP;
  tile::Source query, dout;
  const float2* stats = nullptr;
  const auto seek = [&](int query_head, int row) {
    const int thread = ptx::thread_index();
    query = tile::source_at<D>(task.query.data, task.query.row_stride, task.query.head_stride, query_head, row,
                               task.head_dim, thread);
    dout = tile::source_at<DV>(task.dout.data, task.dout.row_stride, task.dout.head_stride, query_head, row,
                               task.head_dim_v, thread);
    stats = static_cast<const float2*>(task.scratch) + query_head * task.total_q + row + thread;
  };
  // Copies ROWS rows. Those at or past the range of the tile may belong to another document: zeros, in every operand.
  const auto fetch = [&](int buffer, int query_head, int row) {
    if constexpr (!WALK) seek(query_head, row);
    const int thread = ptx::thread_index(), valid = keys.end - row;
    tile::copy_rows<D, ROWS, S::kThreads>(base + S::kQuery + buffer * S::kQueryBytes, query, valid);
    tile::copy_rows<DV, ROWS, S::kThreads>(base + S::kDout + buffer * S::kDoutBytes, dout, valid);
    if (thread < ROWS) {
      ptx::cp_async8(base + S::kStats + (buffer * ROWS + thread) * 8, thread < valid ? stats : task.scratch,
                     thread < valid);
    }
    if constexpr (WALK) {
      stats += ROWS;
      ptx::hold(query.next);
      ptx::hold(dout.next);
      ptx::hold(stats);
    }
  };
  if (first_head < past_head) {
    if constexpr (WALK) seek(first_head, keys.begin);
    fetch(0, first_head, keys.begin);
  }
  ptx::cp_async_commit();
  const uint32_t ranges = base + S::kRanges + warp * S::kWarpKeys * 8;
  const tile::Span span =
      tile::load_ranges<S::kWarpKeys>(ranges, task.query_begin + keys.row + own, task.query_end + keys.row + own,
                                      keys.rows - own, keys.begin, keys.end, lane);
  ptx::cp_async_wait<1>();
  ptx::block_sync();  // B1: keys, values and ranges are there

  const uint32_t key_a = base + S::kKey + own * D * 2 + tile::lane_a<D>(lane);
  const uint32_t value_a = base + S::kValue + own * DV * 2 + tile::lane_a<DV>(lane);
  uint32_t kf[MT][KEY_STEPS > 0 ? KEY_STEPS : 1][4], vf[S::kValueInRegisters ? MT : 1][DV / 16][4];
  if constexpr (KEY_STEPS > 0) tile::load_a<D>(kf, key_a);
  if constexpr (S::kValueInRegisters) tile::load_a<DV>(vf, value_a);
  float dk[MT][S::kColumns / 8][4], dv[MT][S::kColumnsV / 8][4];
  tile::zero(dk);
  tile::zero(dv);
  const ScoreScale scale = score_scale<SOFTCAP>(task);

  int row = keys.begin, query_head = first_head, buffer = 0;
  while (query_head < past_head) {
    ptx::cp_async_wait<0>();
    ptx::block_sync();  // B2: these rows are there; all warps are done with the other buffer
    int next_row = row + ROWS, next_head = query_head;
    if (next_row >= keys.end) {
      next_row = keys.begin;
      ++next_head;
      if (WALK && next_head < past_head) seek(next_head, next_row);
    }
    if constexpr (S::STAGES > 1) {
      if (next_head < past_head) fetch(buffer ^ 1, next_head, next_row);
      ptx::cp_async_commit();
    }
#pragma unroll 1
    for (int at = 0; at < ROWS; at += SLICE) {
      const int slice = row + at, mine = slice + part * PART;  // first query: of the slice, of this warp's scores
      if (slice + SLICE <= span.some_begin || slice >= span.some_end) continue;
      const uint32_t queries = base + S::kQuery + buffer * S::kQueryBytes;
      const uint32_t douts = base + S::kDout + buffer * S::kDoutBytes;
      const int from = at + part * PART;
      float s[MT][NT][4], dp[MT][NT][4];
      tile::zero(s);
      const uint32_t query_lane = queries + from * D * 2 + tile::lane_b<D>(lane);
      if constexpr (KEY_STEPS > 0) tile::multiply_rows<T, D>(s, kf, query_lane);
      if constexpr (KEY_STEPS < D / 16) {
        tile::multiply_rows<T, D, D / 16 - KEY_STEPS>(s, tile::column_step<D>(key_a, KEY_STEPS),
                                                      tile::column_step<D>(query_lane, KEY_STEPS));
      }
      tile::zero(dp);
      if constexpr (S::kValueInRegisters) {
        tile::multiply_rows<T, DV>(dp, vf, douts + from * DV * 2 + tile::lane_b<DV>(lane));
      } else {
        tile::multiply_rows<T, DV, DV / 16>(dp, value_a, douts + from * DV * 2 + tile::lane_b<DV>(lane));
      }
      const uint32_t row_stats = base + S::kStats + (buffer * ROWS + from + lane % 4 * 2) * 8;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float4 x = ptx::lds128f(row_stats + n * 64);  // of two queries
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            weigh<SOFTCAP>(s[m][n][j], dp[m][n][j], scale, j % 2 ? float2{x.z, x.w} : float2{x.x, x.y});
          }
        }
      }
      // A weight that is masked may have overflowed: selected away, not multiplied by 0.
      if (!(mine >= span.full_begin && mine + PART <= span.full_end)) tile::mask(s, ranges, mine, 0.f, lane);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) dp[m][n][j] *= s[m][n][j];
        }
      }
      const uint32_t query_b = queries + part * S::kColumns * 2 + tile::lane_a<D>(lane);
      const uint32_t dout_b = douts + part * S::kColumnsV * 2 + tile::lane_a<DV>(lane);
      uint32_t p[MT][NT / 2][4], ds[MT][NT / 2][4];
      tile::as_operand<T>(p, s);
      tile::as_operand<T>(ds, dp);
      if constexpr (SPLIT > 1) {
        const uint32_t exchange = base + S::kExchange + warp * S::kExchangeBytes;
        if (at > 0) ptx::named_sync(1 + group, SPLIT * 32);  // B3: the others are done with the slice before
        put_operands(exchange, p, lane);
        put_operands(exchange + S::kExchangeBytes / 2, ds, lane);
      }
      tile::multiply_columns<T, DV>(dv, p, dout_b + from * DV * 2);
      tile::multiply_columns<T, D>(dk, ds, query_b + from * D * 2);
      if constexpr (SPLIT > 1) {
        ptx::named_sync(1 + group, SPLIT * 32);  // B4: the others' weights are there
#pragma unroll
        for (int i = 1; i < SPLIT; ++i) {
          const int other = (part + i) & (SPLIT - 1), theirs = at + other * PART;
          const uint32_t exchange = base + S::kExchange + (group * SPLIT + other) * S::kExchangeBytes;
          get_operands(p, exchange, lane);
          tile::multiply_columns<T, DV>(dv, p, dout_b + theirs * DV * 2);
          get_operands(ds, exchange + S::kExchangeBytes / 2, lane);
          tile::multiply_columns<T, D>(dk, ds, query_b + theirs * D * 2);
        }
      }
    }
    if constexpr (S::STAGES == 1) {
      ptx::block_sync();  // B5: all warps are done with the one buffer
      if (next_head < past_head) fetch(0, next_head, next_row);
      ptx::cp_async_commit();
    }
    row = next_row, query_head = next_head;
    if constexpr (S::STAGES > 1) buffer ^= 1;
  }
  ptx::cp_async_wait<0>();

  // Through this warp's rows and columns of the keys and values, which nobody reads any more.
  if constexpr (SPLIT > 1) ptx::named_sync(1 + group, SPLIT * 32);  // B6
  clear_empty_rows(dk, ranges, lane);
  clear_empty_rows(dv, ranges, lane);
  const int64_t key_row = keys.row + own;
  tile::store_rows<T, D>(dk, task.scale, base + S::kKey + own * D * 2 + part * S::kColumns * 2,
                         static_cast<uint16_t*>(task.dkey.data) + key_row * task.dkey.row_stride +
                             head * task.dkey.head_stride + part * S::kColumns,
                         task.dkey.row_stride, keys.rows - own, task.head_dim - part * S::kColumns, lane);
  tile::store_rows<T, DV>(dv, 1.f, base + S::kValue + own * DV * 2 + part * S::kColumnsV * 2,
                          static_cast<uint16_t*>(task.dvalue.data) + key_row * task.dvalue.row_stride +
                              head * task.dvalue.head_stride + part * S::kColumnsV,
                          task.dvalue.row_stride, keys.rows - own, task.head_dim_v - part * S::kColumnsV, lane);
}

}  // namespace backward

// Grid: any number of blocks. Reads the row statistics in task.scratch; writes all of dkey and dvalue.
template <class S, bool SOFTCAP>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) attention_backward_keys(BackwardTask task) {
  backward::for_each_item(task.key_tiles, task.heads_k,
                          [&](const Tile& keys, int head) { backward::key_tile<S, SOFTCAP>(task, keys, head); });
}

}  // namespace packattn::cuda
