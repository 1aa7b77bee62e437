// Gradients of key and value on Hopper (sm_90a): wgmma fed by bulk copies.
//
//   dV = P^T dO,   dS = P * (dO V^T - delta),   dK = scale dS^T Q     (attention_backward.cuh; Dao et al., 2022)
//
// A persistent block serves work items, a tile of the tile table of the keys and a key head each. Its first warpgroup
// copies; each of the others (consumers) keeps 64 keys and walks over the query rows that see the tile, ROWS at a time,
// for every query head of the group:
//
//   warp 0, one lane   bulk copies of K and V, and of blocks of rows of Q and dO into a ring of STAGES buffers, as soon
//                      as a buffer is free: those of the next item start while this one is computed
//   warp 1             in a head's last block, zeroes the rows past the tile's once they have landed. They are somebody
//                      else's, their weights are 0, and 0 x NaN is NaN.
//   warp 2             the rows' statistics, beside them in the ring
//   consumers          S^T = K Q^T and dP^T = V dO^T together; P^T from S^T while dP^T is still computed; dV += P^T dO;
//                      dS^T while that is; dK += dS^T Q, which runs on beside the next block's S^T
//
// Keys are the rows of the products, so P^T and dS^T become operands without leaving the registers. Every sum runs in
// one order, which depends on the tile alone (head by head, rows from the first that sees the tile): no atomics, and
// the same bits whatever stands next to a document.
//
// Two outputs of 256 columns are too many for the registers: there one pass makes dV, another dK.
#pragma once
#include "hopper_backward_common.cuh"

namespace packattn::cuda {

// D, DV: columns of query/key and value/dout in shared memory. ROWS of a block. PASS: 0 both gradients, 1 dV, 2 dK.
template <int D_, int DV_, int CONSUMERS, int ROWS, int STAGES_, int PASS>
struct HopperBackwardKeyShape : hopper::Ring<STAGES_> {
  static constexpr int D = D_, DV = DV_, kRows = ROWS, STAGES = STAGES_, kPass = PASS;
  static constexpr bool kMakesKey = PASS != 1, kMakesValue = PASS != 2;
  static constexpr int kConsumers = CONSUMERS, kKeys = CONSUMERS * 64, kThreads = 128 * (CONSUMERS + 1);
  // Of a thread. The block is launched with equal shares; the copier gives its away.
  static constexpr int kCopierRegisters = CONSUMERS == 3 ? 32 : 24, kConsumerRegisters = CONSUMERS == 3 ? 160 : 240;

  static constexpr int kKeyPanel = kKeys * 128, kRowPanel = ROWS * 128;
  static constexpr int kKeyBytes = D / 64 * kKeyPanel, kValueBytes = kMakesKey ? DV / 64 * kKeyPanel : 0;
  static constexpr int kQueryBytes = D / 64 * kRowPanel, kDoutBytes = DV / 64 * kRowPanel;
  // A stage: Q, dO. Statistics of a stage: lse * log2 e of each row, then delta of each.
  static constexpr int kValue = kKeyBytes, kRing = kValue + kValueBytes, kDout = kQueryBytes;
  static constexpr int kBufferBytes = kQueryBytes + kDoutBytes, kStatsBytes = ROWS * 8;
  static constexpr int kStageBytes = kBufferBytes + kStatsBytes;
  static constexpr int kStats = kRing + STAGES * kBufferBytes;

  // mbarriers. Full: has landed, statistics and all; empty: has been read; landed: the rows are there, but those past
  // the tile's are still to be zeroed. Own: the tile's keys and values.
  static constexpr int kOwnFull = kStats + STAGES * kStatsBytes, kOwnEmpty = kOwnFull + 8;
  static constexpr int kFull = kOwnEmpty + 8, kEmpty = kFull + 8 * STAGES, kLanded = kEmpty + 8 * STAGES;
  static constexpr int kSharedBytes = kLanded + 8 * STAGES;

  static_assert(D % 64 == 0 && DV % 64 == 0 && ROWS % 16 == 0 && ROWS <= 256);
  static_assert(CONSUMERS == 2 || CONSUMERS == 3);
  static_assert(STAGES >= 2 && kSharedBytes <= 227 * 1024);

  // Blocks of rows that see a tile, for one query head.
  PACKATTN_DEVICE static int blocks(const Tile& tile) {
    return tile.begin < tile.end ? (tile.end - tile.begin + ROWS - 1) / ROWS : 0;
  }
  PACKATTN_DEVICE static uint32_t buffer(int use) { return kRing + hopper::Ring<STAGES>::stage(use) * kBufferBytes; }
};

namespace hopper {

// Calls body(tile, first query head, block of rows) for every use of the ring, in order, and item(tile, key head)
// before those of each item that has any.
template <class Shape, class ItemBody, class Body>
PACKATTN_DEVICE void for_each_use(const BackwardTask& task, const ItemBody& item_body, const Body& body) {
  const int count = ptx::load_global(task.key_tiles.count), heads = task.heads_q / task.heads_k;
  for (forward::Item item = first_item(task.heads_k); item.tile < count; item.advance(task.heads_k)) {
    const Tile tile = tile_of(task.key_tiles, item.tile);
    const int blocks = Shape::blocks(tile), first_head = item.head() * heads;
    if (blocks == 0) continue;
    item_body(tile, item.head());
    for (int head = first_head; head < first_head + heads; ++head) {
      for (int n = 0; n < blocks; ++n) body(tile, head, n);
    }
  }
}

// Warp 0, one lane.
template <class Shape>
PACKATTN_DEVICE void copy_rows_of_items(const BackwardTask& task, const TmaMap* query, const TmaMap* dout,
                                        const TmaMap* key, const TmaMap* value) {
  constexpr int ROWS = Shape::kRows, KEYS = Shape::kKeys;
  const uint32_t base = ptx::smem_base();
  int items = 0, uses = 0;
  for_each_use<Shape>(
      task,
      [&](const Tile& tile, int head) {
        const uint32_t full = base + Shape::kOwnFull;
        ptx::mbarrier_wait(base + Shape::kOwnEmpty, static_cast<uint32_t>(items) % 2 ^ 1);
        ++items;
        ptx::mbarrier_arrive_expect(full, Shape::kKeyBytes + Shape::kValueBytes);
        request_panels<Shape::D, KEYS>(base, key, full, head, tile.row);
        if constexpr (Shape::kMakesKey) {
          request_panels<Shape::DV, KEYS>(base + Shape::kValue, value, full, head, tile.row);
        }
      },
      [&](const Tile& tile, int head, int n) {
        const uint32_t stage = Shape::stage(uses), buffer = base + Shape::buffer(uses);
        const int row = tile.begin + n * ROWS;
        const bool whole = tile.end - row >= ROWS;
        const uint32_t barrier = base + (whole ? Shape::kFull : Shape::kLanded) + stage * 8;
        ptx::mbarrier_wait(base + Shape::kEmpty + stage * 8, Shape::parity(uses) ^ 1);
        ++uses;
        ptx::mbarrier_arrive_expect(barrier, Shape::kBufferBytes);
        request_panels<Shape::D, ROWS>(buffer, query, barrier, head, row);
        request_panels<Shape::DV, ROWS>(buffer + Shape::kDout, dout, barrier, head, row);
      });
}

// Warp 1.
template <class Shape>
PACKATTN_DEVICE void zero_foreign_rows(const BackwardTask& task, int lane) {
  constexpr int ROWS = Shape::kRows;
  const uint32_t base = ptx::smem_base();
  int uses = 0;
  uint32_t parities = 0;  // bit s: of the phase to wait for in stage s; not every use of a stage has one
  for_each_use<Shape>(
      task, [](const Tile&, int) {},
      [&](const Tile& tile, int, int n) {
        const uint32_t stage = Shape::stage(uses), buffer = base + Shape::buffer(uses);
        const int own = tile.end - tile.begin - n * ROWS;
        ++uses;
        if (own >= ROWS) return;
        ptx::mbarrier_wait(base + Shape::kLanded + stage * 8, parities >> stage & 1);
        parities ^= 1u << stage;
        // What is summed over the rows; the other operand only makes numbers that the mask replaces.
        if constexpr (Shape::kMakesKey) zero_rows<Shape::D, ROWS>(buffer, own, lane);
        if constexpr (Shape::kMakesValue) zero_rows<Shape::DV, ROWS>(buffer + Shape::kDout, own, lane);
        ptx::fence_proxy_async();  // wgmma is to see the zeros
        ptx::warp_sync();
        if (lane == 0) ptx::mbarrier_arrive(base + Shape::kFull + stage * 8);
      });
}

// Warp 2. Rows past the tile's get the statistics of rows that see nothing.
template <class Shape>
PACKATTN_DEVICE void load_statistics(const BackwardTask& task, int lane) {
  constexpr int ROWS = Shape::kRows, LOADS = (ROWS + 31) / 32;
  const uint32_t base = ptx::smem_base();
  int uses = 0;
  for_each_use<Shape>(
      task, [](const Tile&, int) {},
      [&](const Tile& tile, int head, int n) {
        const uint32_t stage = Shape::stage(uses), to = base + Shape::kStats + stage * Shape::kStatsBytes;
        const int row = tile.begin + n * ROWS;
        const float2* const from = static_cast<const float2*>(task.scratch) + head * task.total_q + row;
        float2 x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          x[i] = {INFINITY, 0.f};
          if (row + i * 32 + lane < tile.end) x[i] = ptx::load_global(from + i * 32 + lane);
        }
        ptx::mbarrier_wait(base + Shape::kEmpty + stage * 8, Shape::parity(uses) ^ 1);
        ++uses;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          const int at = i * 32 + lane;
          if (ROWS % 32 != 0 && at >= ROWS) break;
          ptx::sts32(to + at * 4, ptx::fbits(x[i].x));
          ptx::sts32(to + (ROWS + at) * 4, ptx::fbits(x[i].y));
        }
        ptx::warp_sync();
        if (lane == 0) ptx::mbarrier_arrive(base + Shape::kFull + stage * 8);
      });
}

// What a thread of consumer `group` has of one item: two keys (lane / 4 and 8 more of its warp's 16).
template <class T, class Shape, bool SOFTCAP>
struct KeyConsumer {
  static constexpr int D = Shape::D, DV = Shape::DV, ROWS = Shape::kRows;

  uint32_t base;
  int group, lane;
  backward::ScoreScale scale;
  int uses = 0;          // of the ring, over all items
  int begin[2], end[2];  // the rows that see the keys, less this lane's first column
  float dk[Shape::kMakesKey ? D / 2 : 2], dv[Shape::kMakesValue ? DV / 2 : 2];
  float s[ROWS / 2], dp[Shape::kMakesKey ? ROWS / 2 : 2];
  uint32_t p[ROWS / 16][4], ds[ROWS / 16][4];

  PACKATTN_DEVICE void wait_full() {
    ptx::mbarrier_wait(base + Shape::kFull + Shape::stage(uses) * 8, Shape::parity(uses));
  }
  // This warp has read what use `use` brought.
  PACKATTN_DEVICE void free(int use) {
    ptx::warp_sync();  // lanes have read statistics
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + Shape::stage(use) * 8);
  }
  // Whether key r is seen by the row of accumulator column `column`; row: the block's first.
  PACKATTN_DEVICE bool seen(int column, int r, int row) const {
    return column >= begin[r] - row && column < end[r] - row;
  }

  // P^T of the block, as operand. s becomes what dP^T - delta is multiplied with.
  template <bool MASK>
  PACKATTN_DEVICE void weigh(int row) {
    const uint32_t lse = base + Shape::kStats + Shape::stage(uses) * Shape::kStatsBytes + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      const float2 x = ptx::lds64(lse + j * 32);  // of two queries
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s[4 * j + 2 * r + i];
          const float2 both = weight_and_slope<SOFTCAP>(score, scale, i == 0 ? x.x : x.y);
          weight[i] = MASK && !seen(j * 8 + i, r, row) ? 0.f : both.x;
          score = both.y;
        }
        p[j / 2][j % 2 * 2 + r] = ptx::pack2<T>(weight[0], weight[1]);
      }
    }
  }
  // dS^T of the block, as operand. What is masked may be no number: selected away, not multiplied by 0.
  template <bool MASK>
  PACKATTN_DEVICE void differentiate(int row) {
    const uint32_t delta = base + Shape::kStats + Shape::stage(uses) * Shape::kStatsBytes + ROWS * 4 + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      const float2 x = ptx::lds64(delta + j * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float gradient[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * j + 2 * r + i;
          gradient[i] = s[at] * (dp[at] - (i == 0 ? x.x : x.y));
          if (MASK && !seen(j * 8 + i, r, row)) gradient[i] = 0.f;
        }
        ds[j / 2][j % 2 * 2 + r] = ptx::pack2<T>(gradient[0], gradient[1]);
      }
    }
  }

  // One block of rows. The last product is not waited for, nor is the buffer freed: that is the next step's or drain's.
  template <bool MASK>
  PACKATTN_DEVICE void step(int row, bool first) {
    const uint32_t buffer = base + Shape::buffer(uses), own = base + group * 64 * 128;
    wait_full();
    ptx::wgmma_fence();
    multiply_rows<T, D>(s, own, Shape::kKeyPanel, buffer, Shape::kRowPanel);
    if constexpr (Shape::kMakesKey) {
      multiply_rows<T, DV>(dp, own + Shape::kValue, Shape::kKeyPanel, buffer + Shape::kDout, Shape::kRowPanel);
      ptx::wgmma_wait<1>(s, dk);
    } else {
      ptx::wgmma_wait<0>(s, dv);
    }
    if (!first) free(uses - 1);
    weigh<MASK>(row);
    if constexpr (Shape::kMakesValue) {
      ptx::wgmma_fence();
      multiply_columns<T>(dv, p, buffer + Shape::kDout);
    }
    if constexpr (Shape::kMakesKey) {
      ptx::wgmma_wait<Shape::kMakesValue ? 1 : 0>(dp);
      differentiate<MASK>(row);
      ptx::wgmma_fence();
      multiply_columns<T>(dk, ds, buffer);
      if constexpr (Shape::kMakesValue) ptx::wgmma_wait<1>(dv);  // p is free again
    }
    ++uses;
  }
  PACKATTN_DEVICE void drain() {
    if constexpr (Shape::kMakesKey) {
      ptx::wgmma_wait<0>(dk);
    } else {
      ptx::wgmma_wait<0>(dv);
    }
    free(uses - 1);
  }
  // A block of which these keys are not seen.
  PACKATTN_DEVICE void skip() {
    wait_full();
    free(uses);
    ++uses;
  }

  // The tile is read again, which costs less than its registers in the loop.
  PACKATTN_DEVICE void store(const BackwardTask& task, const forward::Item& item, int warp) {
    const Tile tile = tile_of(task.key_tiles, item.tile);
    const int quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = warp * 16 + lane / 4 + 8 * r;
      const int64_t key = static_cast<int64_t>(tile.row) + in_tile;
      const bool mine = in_tile < tile.rows, seen = begin[r] < end[r];
      const auto at = [&](const TensorView& x) {
        return static_cast<uint16_t*>(x.data) + item.head() * x.head_stride + key * x.row_stride;
      };
      if constexpr (Shape::kMakesKey) {
        store_row<T, D>(at(task.dkey), dk, r, task.scale, seen, mine, task.head_dim, quad);
      }
      if constexpr (Shape::kMakesValue) {
        store_row<T, DV>(at(task.dvalue), dv, r, 1.f, seen, mine, task.head_dim_v, quad);
      }
    }
  }
};

}  // namespace hopper

// Grid: any number of blocks. Reads the row statistics in task.scratch; writes all of dkey, of dvalue or both.
template <class T, class Shape, bool SOFTCAP>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    hopper_backward_keys(const __grid_constant__ TmaMap query, const __grid_constant__ TmaMap dout,
                         const __grid_constant__ TmaMap key, const __grid_constant__ TmaMap value,
                         const __grid_constant__ BackwardTask task) {
  constexpr int ROWS = Shape::kRows, CONSUMERS = Shape::kConsumers;
  const int thread = ptx::thread_index(), lane = thread % 32, warp = forward::uniform(thread / 32);
  const uint32_t base = ptx::smem_base();
  if (thread == 0) {
    ptx::mbarrier_init(base + Shape::kOwnFull, 1);
    ptx::mbarrier_init(base + Shape::kOwnEmpty, 4 * CONSUMERS);
    for (int i = 0; i < Shape::STAGES; ++i) {
      ptx::mbarrier_init(base + Shape::kFull + i * 8, 2);  // rows and statistics
      ptx::mbarrier_init(base + Shape::kEmpty + i * 8, 4 * CONSUMERS);
      ptx::mbarrier_init(base + Shape::kLanded + i * 8, 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (warp < 4) {
    ptx::registers_decrease<Shape::kCopierRegisters>();
    if (warp == 0 && lane == 0) hopper::copy_rows_of_items<Shape>(task, &query, &dout, &key, &value);
    if (warp == 1) hopper::zero_foreign_rows<Shape>(task, lane);
    if (warp == 2) hopper::load_statistics<Shape>(task, lane);
    return;
  }
  ptx::registers_increase<Shape::kConsumerRegisters>();
  hopper::KeyConsumer<T, Shape, SOFTCAP> consumer;
  consumer.base = base;
  consumer.group = warp / 4 - 1;
  consumer.lane = lane;
  consumer.scale = backward::score_scale<SOFTCAP>(task);
  uint32_t items = 0;
  forward::Item item = hopper::first_item(task.heads_k);
  for (; item.tile < forward::uniform(ptx::load_global(task.key_tiles.count)); item.advance(task.heads_k)) {
    const Tile tile = forward::load_tile(task.key_tiles.tiles + item.tile);
    const auto ranges =
        hopper::GroupRanges::load(task.query_begin, task.query_end, tile, consumer.group * 64, warp, lane);
    const hopper::GroupBlocks<ROWS> seen(ranges, tile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      consumer.begin[r] = ranges.begin[r] - lane % 4 * 2;
      consumer.end[r] = ranges.end[r] - lane % 4 * 2;
    }
    for (float& x : consumer.dk) x = 0.f;
    for (float& x : consumer.dv) x = 0.f;
    const int blocks = Shape::blocks(tile);
    if (blocks > 0) {
      ptx::mbarrier_wait(base + Shape::kOwnFull, items % 2);
      ++items;
      for (int heads = task.heads_q / task.heads_k; heads > 0; --heads) {
        int n = 0;
        for (; n < seen.some_first; ++n) consumer.skip();
        for (; n < seen.first && n < seen.some_last; ++n) {
          consumer.template step<true>(tile.begin + n * ROWS, n == seen.some_first);
        }
        for (; n < seen.last; ++n) consumer.template step<false>(tile.begin + n * ROWS, n == seen.some_first);
        for (; n < seen.some_last; ++n) consumer.template step<true>(tile.begin + n * ROWS, n == seen.some_first);
        if (seen.some_first < seen.some_last) consumer.drain();
        for (; n < blocks; ++n) consumer.skip();
      }
      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kOwnEmpty);  // all products with K and V are done
    }
    consumer.store(task, item, warp - 4);
  }
}

}  // namespace packattn::cuda
