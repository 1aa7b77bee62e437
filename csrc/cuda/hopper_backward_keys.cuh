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
//   consumers          P^T from S^T = K Q^T; dV += P^T dO and dP^T = V dO^T; dS^T from dP^T; dK += dS^T Q, issued
//                      behind the next block's S^T, whose exponentials run beside it
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
  // Of a thread. The block is launched with equal shares; the copier gives its away, but what statistics of many rows
  // need.
  static constexpr int kCopierRegisters = ROWS > 64 ? 40 : 24, kConsumerRegisters = ROWS > 64 ? 232 : 240;

  static constexpr int kKeyPanel = kKeys * 128, kRowPanel = ROWS * 128;
  static constexpr int kKeyBytes = D / 64 * kKeyPanel, kValueBytes = kMakesKey ? DV / 64 * kKeyPanel : 0;
  static constexpr int kQueryBytes = D / 64 * kRowPanel, kDoutBytes = DV / 64 * kRowPanel;
  // A stage: Q, dO. Statistics of a stage: lse * log2 e of each row, then delta of each.
  static constexpr int kValue = kKeyBytes, kRing = kValue + kValueBytes, kDout = kQueryBytes;
  static constexpr int kBufferBytes = kQueryBytes + kDoutBytes, kStatsBytes = ROWS * 8;
  static constexpr int kStageBytes = kBufferBytes + kStatsBytes;
  static constexpr int kStats = kRing + STAGES * kBufferBytes;

  // What each warp of the consumers notes down of its item: KeyConsumer::Note, ranges of its 16 keys.
  static constexpr int kNotes = kStats + STAGES * kStatsBytes, kRanges = 32, kNotesBytes = kRanges + 16 * 8;

  // mbarriers. Full: has landed, statistics and all; empty: has been read; landed: the rows are there, but those past
  // the tile's are still to be zeroed. Own: the tile's keys and values.
  static constexpr int kOwnFull = kNotes + CONSUMERS * 4 * kNotesBytes, kOwnEmpty = kOwnFull + 8;
  static constexpr int kFull = kOwnEmpty + 8, kEmpty = kFull + 8 * STAGES, kLanded = kEmpty + 8 * STAGES;
  static constexpr int kSharedBytes = kLanded + 8 * STAGES;

  static_assert(D % 64 == 0 && DV % 64 == 0 && ROWS % 16 == 0 && ROWS <= 256);
  static_assert(CONSUMERS == 2);
  static_assert(STAGES >= 2 && kSharedBytes <= 227 * 1024);

  // Blocks of rows that see a tile, for one query head.
  PACKATTN_DEVICE static int blocks(const Tile& tile) {
    return tile.begin < tile.end ? (tile.end - tile.begin + ROWS - 1) / ROWS : 0;
  }
  PACKATTN_DEVICE static uint32_t buffer(int use) { return kRing + hopper::Ring<STAGES>::stage(use) * kBufferBytes; }
};

namespace hopper {

// A tile and a key head: this block's item in a round, in the order of forward::Item. All that is to be kept from one
// item to the next is the round.
struct KeyItem {
  int tile, head, group;  // group: of query heads, how many share the key head
  PACKATTN_DEVICE KeyItem(const BackwardTask& task, int round) {
    const auto blocks = static_cast<uint32_t>(gridDim.x), block = static_cast<uint32_t>(ptx::block_index());
    const uint32_t turn = round % 2 == 0 ? block : blocks - 1 - block;
    const uint32_t number = static_cast<uint32_t>(round) * blocks + turn;
    auto heads = static_cast<uint32_t>(task.heads_k);
    ptx::hold(heads);  // else what divisions by it need is kept in registers
    tile = static_cast<int>(number / heads);
    head = static_cast<int>(number % heads);
    group = static_cast<int>(static_cast<uint32_t>(task.heads_q) / heads);
  }
};

// Calls body(query head, first row of the block, end of the tile's rows) for every use of the ring, in order, and
// item_body(tile, key head) before those of each item that has any.
template <class Shape, class ItemBody, class Body>
PACKATTN_DEVICE void for_each_use(const BackwardTask& task, const ItemBody& item_body, const Body& body) {
  for (int round = 0;; ++round) {
    const KeyItem item(task, round);
    if (item.tile >= ptx::load_global(task.key_tiles.count)) return;
    const Tile tile = tile_of(task.key_tiles, item.tile);
    if (tile.begin >= tile.end) continue;
    item_body(tile, item.head);
    int head = item.head * item.group;
#pragma unroll 1  // registers
    for (int left = item.group; left > 0; --left, ++head) {
#pragma unroll 1
      for (int row = tile.begin; row < tile.end; row += Shape::kRows) body(head, row, tile.end);
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
      [&](int head, int row, int end) {
        const uint32_t stage = Shape::stage(uses), buffer = base + Shape::buffer(uses);
        const bool whole = end - row >= ROWS;
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
      [&](int, int row, int end) {
        const uint32_t stage = Shape::stage(uses), buffer = base + Shape::buffer(uses);
        const int own = end - row;
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
PACKATTN_DEVICE void load_statistics(const BackwardTask& task) {
  constexpr int ROWS = Shape::kRows, LOADS = (ROWS + 31) / 32;
  const uint32_t base = ptx::smem_base();
  int uses = 0;
  for_each_use<Shape>(
      task, [](const Tile&, int) {},
      [&](int head, int row, int end) {
        const int lane = ptx::thread_index() % 32;
        const uint32_t stage = Shape::stage(uses), to = base + Shape::kStats + stage * Shape::kStatsBytes;
        int64_t first = head * task.total_q + row + lane;
        ptx::hold(first);  // else addresses are kept in registers
        const float2* const from = static_cast<const float2*>(task.scratch) + first;
        float2 x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
          x[i] = {INFINITY, 0.f};
          if (row + i * 32 + lane < end) x[i] = ptx::load_global(from + i * 32);
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

// What a thread of a consumer has of one item: two keys (lane / 4 and 8 more of its warp's 16).
template <class T, class Shape, bool SOFTCAP>
struct KeyConsumer {
  static constexpr int D = Shape::D, DV = Shape::DV, ROWS = Shape::kRows;

  uint32_t base, own, notes;  // shared memory: all of it, this group's keys, this warp's notes
  int lane;
  backward::ScoreScale scale;
  int uses = 0;  // of the ring, over all items
  float dk[Shape::kMakesKey ? D / 2 : 2], dv[Shape::kMakesValue ? DV / 2 : 2];
  float s[ROWS / 2], dp[Shape::kMakesKey ? ROWS / 2 : 2];
  float slope[ROWS / 2];
  uint32_t operands[ROWS / 16][4];  // P^T or dS^T

  PACKATTN_DEVICE void wait_full(int use) {
    ptx::mbarrier_wait(base + Shape::kFull + Shape::stage(use) * 8, Shape::parity(use));
  }
  PACKATTN_DEVICE void free_stage() {
    ptx::warp_sync();  // all lanes have read their statistics
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + Shape::stage(uses) * 8);
    ++uses;
  }
  // The rows that see this thread's two keys, relative to the first of its columns in a block that starts at `row`.
  struct Seen {
    int begin[2], end[2];
    PACKATTN_DEVICE bool operator()(int i) const {  // accumulator i of the block
      const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
      return column >= begin[r] && column < end[r];
    }
  };
  PACKATTN_DEVICE Seen seen_from(int row) const {
    Seen seen;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 range = ptx::lds64(notes + Shape::kRanges + (lane / 4 + 8 * r) * 8);
      seen.begin[r] = ptx::fint(range.x) - row - lane % 4 * 2;
      seen.end[r] = ptx::fint(range.y) - row - lane % 4 * 2;
    }
    return seen;
  }

  // Of use `use` of the ring, which starts with row `row`: s becomes P^T, slope what dP^T - delta is multiplied with:
  // P^T, with a soft cap times its derivative.
  template <bool MASK>
  PACKATTN_DEVICE void weigh(int use, int row) {
    Seen seen;
    if constexpr (MASK) seen = seen_from(row);
    const uint32_t lse = base + Shape::kStats + Shape::stage(use) * Shape::kStatsBytes + lane % 4 * 8;
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      const float2 x = ptx::lds64(lse + j * 32);  // of two queries
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * j + i;
        const float shift = i % 2 == 0 ? x.x : x.y;
        float weight;
        if constexpr (SOFTCAP) {
          const float t = tile::tanh_scaled(s[at] * scale.inner);
          weight = ptx::ex2(t * scale.factor - shift);
          slope[at] = weight * (1.f - t * t);
          bits ^= ptx::fbits(slope[at]);
        } else {
          weight = ptx::ex2(s[at] * scale.factor - shift);
          bits ^= ptx::fbits(weight);
        }
        (SOFTCAP ? s : slope)[at] = MASK && !seen(at) ? 0.f : weight;
      }
    }
    ptx::finish_before_here(bits);  // to run beside the product that is waited for next
  }
  // dS^T in dp. What is masked may be no number: selected away, not multiplied by 0.
  template <bool MASK>
  PACKATTN_DEVICE void differentiate(int row) {
    Seen seen;
    if constexpr (MASK) seen = seen_from(row);
    const uint32_t delta = base + Shape::kStats + Shape::stage(uses) * Shape::kStatsBytes + ROWS * 4 + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
      const float2 x = ptx::lds64(delta + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * j + i;
        const float gradient = slope[at] * (dp[at] - (i % 2 == 0 ? x.x : x.y));
        dp[at] = MASK && !seen(at) ? 0.f : gradient;
      }
    }
  }

  // What a block begins with, of use `use` of the ring: S^T, and dP^T where no other product is left to follow S^T.
  PACKATTN_DEVICE void multiply_scores(int use) {
    multiply_rows<T, D>(s, own, Shape::kKeyPanel, base + Shape::buffer(use), Shape::kRowPanel);
    if constexpr (!Shape::kMakesValue) multiply_gradients(use);
  }
  PACKATTN_DEVICE void multiply_gradients(int use) {
    multiply_rows<T, DV>(dp, own + Shape::kValue, Shape::kKeyPanel, base + Shape::buffer(use) + Shape::kDout,
                         Shape::kRowPanel);
  }
  // The weights of a head's first block, of which nothing is known.
  PACKATTN_DEVICE void start(int row) {
    wait_full(uses);
    ptx::wgmma_fence();
    multiply_scores(uses);
    if constexpr (Shape::kMakesValue) {
      ptx::wgmma_wait<0>(s);
    } else {
      ptx::wgmma_wait<0>(s, dp);
    }
    weigh<true>(uses, row);
  }
  // Operand of the last product of a block whose weights are in s: dS^T, or P^T where dV is all there is to make.
  template <bool MASK>
  PACKATTN_DEVICE void make_operand(int row) {
    if constexpr (Shape::kMakesValue) pack_operands<T>(operands, SOFTCAP ? s : slope);
    if constexpr (Shape::kMakesValue && Shape::kMakesKey) {
      ptx::wgmma_fence();
      multiply_columns<T>(dv, operands, base + Shape::buffer(uses) + Shape::kDout);
      multiply_gradients(uses);
      ptx::wgmma_wait<0>(dv, dp);
    }
    if constexpr (Shape::kMakesKey) {
      differentiate<MASK>(row);
      pack_operands<T>(operands, dp);
    }
  }
  PACKATTN_DEVICE void multiply_operand() {
    const uint32_t buffer = base + Shape::buffer(uses);
    if constexpr (Shape::kMakesKey) {
      multiply_columns<T>(dk, operands, buffer);
    } else {
      multiply_columns<T>(dv, operands, buffer + Shape::kDout);
    }
  }
  // A block of rows whose weights are in s, and the weights of the next. ptxas serialises all products if one is in
  // flight where the loop closes, or while operands are packed.
  template <bool MASK>
  PACKATTN_DEVICE void step(int row) {
    make_operand<MASK>(row);
    wait_full(uses + 1);
    ptx::wgmma_fence();
    multiply_scores(uses + 1);
    multiply_operand();
    ptx::wgmma_wait<Shape::kMakesValue ? 1 : 2>(s);
    weigh<MASK>(uses + 1, row + ROWS);
    wait_operand();
  }
  // The head's last block.
  PACKATTN_DEVICE void finish(int row) {
    make_operand<true>(row);
    ptx::wgmma_fence();
    multiply_operand();
    wait_operand();
  }
  PACKATTN_DEVICE void wait_operand() {
    if constexpr (Shape::kPass == 0) {
      ptx::wgmma_wait<0>(dk);
    } else if constexpr (Shape::kPass == 1) {
      ptx::wgmma_wait<0>(dv);
    } else {
      ptx::wgmma_wait<0>(dk, dp);
    }
    free_stage();
  }
  // A block of which these keys are not seen.
  PACKATTN_DEVICE void skip() {
    wait_full(uses);
    free_stage();
  }

  // Bounds of the loops over a head's blocks, as rows: noted down, because they would hold registers in the loops.
  // Blocks from kBegin on see nothing of this group's keys, from kSome on some of it, of kFirst <= block < kFull this
  // one and the next all of it, the block at kLast is the last to see any, and there are no blocks from kEnd on.
  // kRound is that of the item, kItems counts those so far that had blocks.
  enum Note { kBegin, kSome, kFirst, kFull, kLast, kEnd, kRound, kItems };
  PACKATTN_DEVICE int noted(Note note) const {
    return forward::uniform(static_cast<int>(ptx::lds32(notes + note * 4)));
  }
  PACKATTN_DEVICE void note_item(const BackwardTask& task, const Tile& tile, int round, int items) {
    const int warp = forward::uniform(ptx::thread_index() / 32), group = warp / 4 - 1;
    const GroupRanges ranges = GroupRanges::load<true>(task.query_begin, task.query_end, tile, group * 64, warp, lane);
    const GroupBlocks<ROWS> blocks(ranges, tile);
    const auto note = [&](Note note, int block) {
      ptx::sts32(notes + note * 4, ptx::ibits(tile.begin + block * ROWS));
    };
    ptx::warp_sync();  // all have read those of the item before
    if (lane == 0) {
      note(kBegin, 0);
      note(kSome, blocks.some_first);
      note(kFirst, blocks.first);
      note(kFull, blocks.last - 1);
      note(kLast, blocks.some_last - 1);
      note(kEnd, Shape::blocks(tile));
      ptx::sts32(notes + kRound * 4, ptx::ibits(round));
      ptx::sts32(notes + kItems * 4, ptx::ibits(items));
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::sts64(notes + Shape::kRanges + (lane / 4 + 8 * r) * 8,
                   float2{ptx::bitsf(ptx::ibits(ranges.begin[r])), ptx::bitsf(ptx::ibits(ranges.end[r]))});
      }
    }
    ptx::warp_sync();
  }

  // All blocks of one query head.
  PACKATTN_DEVICE void run_head() {
    int row = noted(kBegin);
#pragma unroll 1
    for (const int end = noted(kSome); row < end; row += ROWS) skip();
    if (row <= noted(kLast)) {
      start(row);
      const auto steps = [&](auto mask, Note note) {
        const int last = noted(kLast), wanted = noted(note), end = wanted < last ? wanted : last;
        for (; row < end; row += ROWS) step<mask>(row);
      };
      steps(std::true_type(), kFirst);
      steps(std::false_type(), kFull);
      steps(std::true_type(), kLast);
      finish(row);
      row += ROWS;
    }
#pragma unroll 1
    for (const int end = noted(kEnd); row < end; row += ROWS) skip();
  }

  // What it needs is read again, not kept in registers over the loops.
  PACKATTN_DEVICE void store(const BackwardTask& task) {
    const KeyItem item(task, noted(kRound));
    const Tile tile = tile_of(task.key_tiles, item.tile);
    const int quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_warp = lane / 4 + 8 * r, in_tile = (ptx::thread_index() / 32 - 4) * 16 + in_warp;
      const int64_t key = static_cast<int64_t>(tile.row) + in_tile;
      const float2 range = ptx::lds64(notes + Shape::kRanges + in_warp * 8);
      const bool mine = in_tile < tile.rows, seen = ptx::fint(range.x) < ptx::fint(range.y);
      const auto at = [&](const TensorView& x) {
        return static_cast<uint16_t*>(x.data) + item.head * x.head_stride + key * x.row_stride;
      };
      if constexpr (Shape::kMakesKey) {
        store_row<T, D>(at(task.dkey), dk, r, task.scale, seen, mine, task.head_dim, quad);
      }
      if constexpr (Shape::kMakesValue) {
        store_row<T, DV>(at(task.dvalue), dv, r, 1.f, seen, mine, task.head_dim_v, quad);
      }
    }
  }

  PACKATTN_DEVICE void run(const BackwardTask& task) {
    for (int round = 0, items = 0;; round = noted(kRound) + 1, items = noted(kItems)) {
      const KeyItem item(task, round);
      if (item.tile >= forward::uniform(ptx::load_global(task.key_tiles.count))) return;
      const Tile tile = forward::load_tile(task.key_tiles.tiles + item.tile);
      const bool has_blocks = tile.begin < tile.end;
      note_item(task, tile, round, has_blocks ? items + 1 : items);
      for (float& x : dk) x = 0.f;
      for (float& x : dv) x = 0.f;
      if (has_blocks) {
        ptx::mbarrier_wait(base + Shape::kOwnFull, static_cast<uint32_t>(items) % 2);
#pragma unroll 1
        for (int heads = item.group; heads > 0; --heads) run_head();
        if (lane == 0) ptx::mbarrier_arrive(base + Shape::kOwnEmpty);  // all products with K and V are done
      }
      store(task);
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
  constexpr int CONSUMERS = Shape::kConsumers;
  const int warp = forward::uniform(ptx::thread_index() / 32);
  const uint32_t base = ptx::smem_base();
  if (ptx::thread_index() == 0) {
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
    const int thread = ptx::thread_index();
    if (thread == 0) hopper::copy_rows_of_items<Shape>(task, &query, &dout, &key, &value);
    if (thread / 32 == 1) hopper::zero_foreign_rows<Shape>(task, thread % 32);
    if (thread / 32 == 2) hopper::load_statistics<Shape>(task);
    return;
  }
  ptx::registers_increase<Shape::kConsumerRegisters>();
  hopper::KeyConsumer<T, Shape, SOFTCAP> consumer;
  {
    const int thread = ptx::thread_index(), warp = forward::uniform(thread / 32) - 4;
    consumer.base = base;
    consumer.own = base + warp / 4 * 64 * 128;
    consumer.notes = base + Shape::kNotes + warp * Shape::kNotesBytes;
    consumer.lane = thread % 32;
  }
  consumer.scale = backward::score_scale<SOFTCAP>(task);
  consumer.run(task);
}

}  // namespace packattn::cuda
