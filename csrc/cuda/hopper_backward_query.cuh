// Gradient of query on Hopper (sm_90a): wgmma fed by bulk copies.
//
//   dQ = scale dS K,   dS = P * (dO V^T - delta)     (attention_backward.cuh; Dao et al., 2022, appendix B.2)
//
// A persistent block serves work items, a tile of query rows and a query head each. Its first warpgroup copies, each of
// the others (consumers) computes 64 rows:
//
//   warp 0, one lane   bulk copies of Q and dO, and of blocks of BN keys and values into a ring of STAGES buffers, as
//                      soon as a buffer is free: those of the next item start while this one is computed
//   warp 1             in a tile's last block, zeroes the keys past the tile's once they have landed. They are somebody
//                      else's, their dS is 0, and 0 x NaN is NaN. Values there do no harm: dS is selected, not
//                      multiplied, to be 0.
//   consumers          S = Q K^T and dP = dO V^T of a block and dQ += dS K of the block before are issued together; the
//                      exponentials of S run beside dP and dQ, dS beside dQ. Blocks that none of the 64 rows sees are
//                      let pass.
//
// Three stages hold the keys of dQ, those of S, and what is being copied. Where shared memory has room for two, dQ goes
// first, so that its keys make room while S and dP are computed. Blocks of keys start at the tile's first key, and rows
// decide alone: no result depends on what else is packed.
#pragma once
#include "hopper_backward_common.cuh"

namespace packattn::cuda {

// D, DV: columns of query/key and value/dout in shared memory. BM rows of a tile, BN keys of a block. STAGES: buffers
// of keys and values; ROW_STAGES: of query and dout.
template <int D_, int DV_, int BM, int BN, int STAGES_, int ROW_STAGES_>
struct HopperBackwardQueryShape {
  static constexpr int D = D_, DV = DV_, kRows = BM, kKeys = BN, STAGES = STAGES_, ROW_STAGES = ROW_STAGES_;
  static constexpr int kConsumers = BM / 64, kThreads = 128 * (kConsumers + 1);
  // Of a thread. The block is launched with equal shares; the copier gives its away.
  static constexpr int kCopierRegisters = 40, kConsumerRegisters = 232;
  static constexpr bool kSumFirst = STAGES == 2;  // dQ of the block before is issued ahead of S and dP

  static constexpr int kRowPanel = BM * 128, kKeyPanel = BN * 128;
  static constexpr int kQueryBytes = D / 64 * kRowPanel, kRowBytes = kQueryBytes + DV / 64 * kRowPanel;
  static constexpr int kRing = ROW_STAGES * kRowBytes;
  static constexpr int kKeyBytes = D / 64 * kKeyPanel, kStageBytes = kKeyBytes + DV / 64 * kKeyPanel;

  // mbarriers. Full: has landed; empty: has been read; landed: the keys are there, but those past the tile's are still
  // to be zeroed.
  static constexpr int kRowsFull = kRing + STAGES * kStageBytes, kRowsEmpty = kRowsFull + 8 * ROW_STAGES;
  static constexpr int kFull = kRowsEmpty + 8 * ROW_STAGES, kEmpty = kFull + 8 * STAGES, kLanded = kEmpty + 8 * STAGES;
  static constexpr int kSharedBytes = kLanded + 8 * STAGES;

  static_assert(D % 64 == 0 && DV % 64 == 0 && BM % 64 == 0 && BN % 16 == 0 && BN <= 256);
  static_assert(kConsumers == 2);
  static_assert(STAGES >= 2 && kSharedBytes <= 227 * 1024);

  // Blocks of keys that a tile sees.
  PACKATTN_DEVICE static int blocks(const Tile& tile) {
    return tile.begin < tile.end ? (tile.end - tile.begin + BN - 1) / BN : 0;
  }
};

//              rows, stages  keys, stages   shared   dQ + S + dP + dS registers, of
//   64,  64      128    2      128    3     160 KB    32 + 64 + 64 + 32 = 192    232
//   128, 128     128    1       96    3     208 KB    64 + 48 + 48 + 24 = 184    232
//   192, 128     128    1       80    2     180 KB    96 + 40 + 40 + 20 = 196    232
//   256, 256     128    1       48    2     224 KB   128 + 24 + 24 + 12 = 188    232
template <class T, int D, int DV, bool SOFTCAP>
struct HopperBackwardQueryShapes;
template <class T, bool SOFTCAP>
struct HopperBackwardQueryShapes<T, 64, 64, SOFTCAP> : HopperBackwardQueryShape<64, 64, 128, 128, 3, 2> {};
template <class T, bool SOFTCAP>
struct HopperBackwardQueryShapes<T, 128, 128, SOFTCAP> : HopperBackwardQueryShape<128, 128, 128, 96, 3, 1> {};
template <class T, bool SOFTCAP>
struct HopperBackwardQueryShapes<T, 192, 128, SOFTCAP> : HopperBackwardQueryShape<192, 128, 128, 80, 2, 1> {};
template <class T, bool SOFTCAP>
struct HopperBackwardQueryShapes<T, 256, 256, SOFTCAP> : HopperBackwardQueryShape<256, 256, 128, 48, 2, 1> {};

namespace hopper::backward_query {

// Warp 0, one lane. The rows of an item wait until the last item's are no longer read, its first keys need not.
template <class Shape>
PACKATTN_DEVICE void copy_items(const BackwardTask& task, const TmaMap* query, const TmaMap* dout, const TmaMap* key,
                                const TmaMap* value) {
  constexpr int BN = Shape::kKeys;
  const uint32_t base = ptx::smem_base();
  const int count = ptx::load_global(task.query_tiles.count);
  RingPosition<Shape::ROW_STAGES> rows;
  RingPosition<Shape::STAGES> at;
  for (forward::Item item = first_item(task.heads_q); item.tile < count; item.advance(task.heads_q)) {
    const Tile tile = tile_of(task.query_tiles, item.tile);
    const int blocks = Shape::blocks(tile), head = item.head(), head_k = head / (task.heads_q / task.heads_k);
    for (int n = 0; n < blocks; ++n) {
      const bool whole = tile.end - tile.begin >= (n + 1) * BN;
      const uint32_t to = base + Shape::kRing + at.stage * Shape::kStageBytes, barriers = base + at.stage * 8;
      ptx::mbarrier_wait(barriers + Shape::kEmpty, at.parity ^ 1);
      copy_panels<Shape::D, BN>(to, key, barriers + (whole ? Shape::kFull : Shape::kLanded), head_k,
                                tile.begin + n * BN);
      copy_panels<Shape::DV, BN>(to + Shape::kKeyBytes, value, barriers + Shape::kFull, head_k, tile.begin + n * BN);
      at.advance();
      if (n > 0) continue;
      const uint32_t rows_to = base + rows.stage * Shape::kRowBytes;
      const uint32_t full = base + Shape::kRowsFull + rows.stage * 8;
      ptx::mbarrier_wait(base + Shape::kRowsEmpty + rows.stage * 8, rows.parity ^ 1);
      copy_panels<Shape::D, Shape::kRows>(rows_to, query, full, head, tile.row);
      copy_panels<Shape::DV, Shape::kRows>(rows_to + Shape::kQueryBytes, dout, full, head, tile.row);
      rows.advance();
    }
  }
}

// Warp 1.
template <class Shape>
PACKATTN_DEVICE void zero_foreign_keys(const BackwardTask& task, int lane) {
  constexpr int BN = Shape::kKeys;
  const uint32_t base = ptx::smem_base();
  const int count = ptx::load_global(task.query_tiles.count);
  uint32_t uses = 0;
  uint32_t parities = 0;  // bit s: of the phase to wait for in stage s; not every use of a stage has one
  for (forward::Item item = first_item(task.heads_q); item.tile < count; item.advance(task.heads_q)) {
    const Tile tile = tile_of(task.query_tiles, item.tile);
    const int blocks = Shape::blocks(tile);
    if (blocks == 0) continue;
    uses += static_cast<uint32_t>(blocks);
    const int own = tile.end - tile.begin - (blocks - 1) * BN;
    if (own == BN) continue;
    const uint32_t stage = (uses - 1) % Shape::STAGES;
    ptx::mbarrier_wait(base + Shape::kLanded + stage * 8, parities >> stage & 1);
    parities ^= 1u << stage;
    zero_rows<Shape::D, BN>(base + Shape::kRing + stage * Shape::kStageBytes, own, lane);
    ptx::fence_proxy_async();  // wgmma is to see the zeros
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kFull + stage * 8);
  }
}

// What a thread of consumer `group` has of one item: two rows (lane / 4 and 8 more of its warp's 16).
template <class T, class Shape, bool SOFTCAP>
struct Consumer {
  static constexpr int D = Shape::D, DV = Shape::DV, BN = Shape::kKeys;

  uint32_t base;
  int group, lane;
  cuda::backward::ScoreScale scale;
  RingPosition<Shape::ROW_STAGES> rows;  // of this item
  RingPosition<Shape::STAGES> at;        // of this block, over all items
  uint32_t before = 0;                   // stage of the block whose dS is in `gradients`
  int begin[2], end[2];                  // the rows' ranges, less this lane's first column
  float2 stats[2];                       // lse * log2 e, delta
  float dq[D / 2], s[BN / 2], dp[BN / 2];
  uint32_t gradients[BN / 16][4];

  PACKATTN_DEVICE void wait_rows() { ptx::mbarrier_wait(base + Shape::kRowsFull + rows.stage * 8, rows.parity); }
  // All products with Q and dO are done.
  PACKATTN_DEVICE void free_rows() {
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kRowsEmpty + rows.stage * 8);
    rows.advance();
  }
  PACKATTN_DEVICE void wait_block() { ptx::mbarrier_wait(base + Shape::kFull + at.stage * 8, at.parity); }
  PACKATTN_DEVICE void free_stage(uint32_t stage) {
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + stage * 8);
  }

  // S and dP of this block, a group of products each.
  PACKATTN_DEVICE void multiply_block() {
    const uint32_t own = base + rows.stage * Shape::kRowBytes + group * 64 * 128;
    const uint32_t keys = base + Shape::kRing + at.stage * Shape::kStageBytes;
    multiply_rows<T, D>(s, own, Shape::kRowPanel, keys, Shape::kKeyPanel);
    multiply_rows<T, DV>(dp, own + Shape::kQueryBytes, Shape::kRowPanel, keys + Shape::kKeyBytes, Shape::kKeyPanel);
  }
  // dQ += dS K of the block before.
  PACKATTN_DEVICE void sum_block() {
    multiply_columns<T>(dq, gradients, base + Shape::kRing + before * Shape::kStageBytes);
  }

  // s: <q, k> becomes the probability, with a soft cap times its derivative, for which dp need not be there yet.
  PACKATTN_DEVICE void weigh() {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const float lse = stats[i / 2 % 2].x;
      if constexpr (SOFTCAP) {
        const float t = tile::tanh_scaled(s[i] * scale.inner);
        s[i] = ptx::ex2(t * scale.factor - lse) * (1.f - t * t);
      } else {
        s[i] = ptx::ex2(s[i] * scale.factor - lse);
      }
    }
  }
  // s becomes dS. What is masked may have overflowed, or be somebody else's: selected away, not multiplied by 0.
  template <bool MASK>
  PACKATTN_DEVICE void differentiate(int first_key) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
      const float ds = s[i] * (dp[i] - stats[r].y);
      const bool outside = MASK && ((column < begin[r] - first_key) | (column >= end[r] - first_key));
      s[i] = outside ? 0.f : ds;
    }
  }
  // Keeps what is in s above the wait that follows, so that it runs beside the products waited for.
  PACKATTN_DEVICE void finish_before_here() {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) bits ^= ptx::fbits(s[i]);
    ptx::finish_before_here(bits);
  }
  PACKATTN_DEVICE void pack() {
    pack_operands<T>(gradients, s);
    before = at.stage;
    at.advance();
  }

  // A block that nobody sees is waited for all the same: else this group could free a stage twice in one phase.
  PACKATTN_DEVICE void skip() {
    wait_block();
    ptx::warp_sync();  // no lane still waits for the phase that lane 0 lets pass
    free_stage(at.stage);
    at.advance();
  }
  // The first block that the group sees; nothing is known of who sees it.
  PACKATTN_DEVICE void start(int first_key) {
    wait_block();
    ptx::wgmma_fence();
    multiply_block();
    ptx::wgmma_wait<1>(s);
    weigh();
    finish_before_here();
    ptx::wgmma_wait<0>(dp);
    differentiate<true>(first_key);
    pack();
  }
  // Another block, and the sums of the one before.
  template <bool MASK>
  PACKATTN_DEVICE void step(int first_key) {
    wait_block();
    ptx::wgmma_fence();
    if constexpr (Shape::kSumFirst) {
      sum_block();
      multiply_block();
      ptx::wgmma_wait<2>(dq);
      free_stage(before);
      ptx::wgmma_wait<1>(s);
      weigh();
      finish_before_here();
      ptx::wgmma_wait<0>(dp);
      differentiate<MASK>(first_key);
    } else {
      multiply_block();
      sum_block();
      ptx::wgmma_wait<2>(s);
      weigh();
      finish_before_here();
      ptx::wgmma_wait<1>(dp);
      differentiate<MASK>(first_key);
      finish_before_here();
      ptx::wgmma_wait<0>(dq);
      free_stage(before);
    }
    pack();
  }
  PACKATTN_DEVICE void finish() {
    ptx::wgmma_fence();
    sum_block();
    ptx::wgmma_wait<0>(dq);
    free_stage(before);
  }

  // Ranges and statistics of the group's 64 rows.
  PACKATTN_DEVICE GroupBlocks<BN> load_rows(const BackwardTask& task, const Tile& tile, int head, int warp) {
    const GroupRanges ranges = GroupRanges::load<true>(task.key_begin, task.key_end, tile, group * 64, warp, lane);
    const float2* const from = static_cast<const float2*>(task.scratch) + head * task.total_q + tile.row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + 8 * r;
      begin[r] = ranges.begin[r] - lane % 4 * 2;
      end[r] = ranges.end[r] - lane % 4 * 2;
      stats[r] = row < tile.rows ? ptx::load_global(from + row) : float2{INFINITY, 0.f};
    }
    return GroupBlocks<BN>(ranges, tile);
  }

  // The tile is read again, which costs less than its registers in the loop.
  PACKATTN_DEVICE void store(const BackwardTask& task, const forward::Item& item, int warp) {
    const Tile tile = tile_of(task.query_tiles, item.tile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = warp * 16 + lane / 4 + 8 * r;
      const int64_t row = static_cast<int64_t>(tile.row) + in_tile;
      uint16_t* const to = static_cast<uint16_t*>(task.dquery.data) + item.head() * task.dquery.head_stride +
                           row * task.dquery.row_stride;
      store_row<T, D>(to, dq, r, task.scale, begin[r] < end[r], in_tile < tile.rows, task.head_dim, lane % 4);
    }
  }
};

}  // namespace hopper::backward_query

// Grid: any number of blocks. Reads the row statistics in task.scratch; writes all of dquery.
template <class T, class Shape, bool SOFTCAP>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_backward_query(const __grid_constant__ TmaMap query, const __grid_constant__ TmaMap dout,
                          const __grid_constant__ TmaMap key, const __grid_constant__ TmaMap value,
                          const __grid_constant__ BackwardTask task) {
  constexpr int BN = Shape::kKeys;
  const int thread = ptx::thread_index(), lane = thread % 32, warp = forward::uniform(thread / 32);
  const uint32_t base = ptx::smem_base();
  if (thread == 0) {
    for (int i = 0; i < Shape::ROW_STAGES; ++i) {
      ptx::mbarrier_init(base + Shape::kRowsFull + i * 8, 2);  // Q and dO
      ptx::mbarrier_init(base + Shape::kRowsEmpty + i * 8, 4 * Shape::kConsumers);
    }
    for (int i = 0; i < Shape::STAGES; ++i) {
      ptx::mbarrier_init(base + Shape::kFull + i * 8, 2);  // keys and values
      ptx::mbarrier_init(base + Shape::kEmpty + i * 8, 4 * Shape::kConsumers);
      ptx::mbarrier_init(base + Shape::kLanded + i * 8, 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (warp < 4) {
    ptx::registers_decrease<Shape::kCopierRegisters>();
    if (warp == 0 && lane == 0) hopper::backward_query::copy_items<Shape>(task, &query, &dout, &key, &value);
    if (warp == 1) hopper::backward_query::zero_foreign_keys<Shape>(task, lane);
    return;
  }
  ptx::registers_increase<Shape::kConsumerRegisters>();
  hopper::backward_query::Consumer<T, Shape, SOFTCAP> consumer;
  consumer.base = base;
  consumer.group = warp / 4 - 1;
  consumer.lane = lane;
  consumer.scale = backward::score_scale<SOFTCAP>(task);
  forward::Item item = hopper::first_item(task.heads_q);
  for (; item.tile < forward::uniform(ptx::load_global(task.query_tiles.count)); item.advance(task.heads_q)) {
    const Tile tile = forward::load_tile(task.query_tiles.tiles + item.tile);
    const hopper::GroupBlocks<BN> seen = consumer.load_rows(task, tile, item.head(), warp - 4);
#pragma unroll
    for (int i = 0; i < Shape::D / 2; ++i) consumer.dq[i] = 0.f;
    const int blocks = Shape::blocks(tile);
    if (blocks > 0) {
      consumer.wait_rows();
      int n = 0;
      for (; n < seen.some_first; ++n) consumer.skip();
      if (n < seen.some_last) {
        consumer.start(tile.begin + n * BN);
        for (++n; n < seen.first && n < seen.some_last; ++n) consumer.template step<true>(tile.begin + n * BN);
        for (; n < seen.last; ++n) consumer.template step<false>(tile.begin + n * BN);
        for (; n < seen.some_last; ++n) consumer.template step<true>(tile.begin + n * BN);
      }
      consumer.free_rows();
      if (seen.some_first < seen.some_last) consumer.finish();
      for (; n < blocks; ++n) consumer.skip();
    }
    consumer.store(task, item, warp - 4);
  }
}

}  // namespace packattn::cuda
