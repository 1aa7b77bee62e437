// Attention forward on Hopper (sm_90a): wgmma fed by bulk copies.
//
// A persistent block serves work items, a tile of the tile table and a query head each, in the order of
// attention_forward.cuh. Its first warpgroup copies, each of the others (consumers) computes 64 query rows:
//
//   warp 0, one lane   bulk copies of Q, and of blocks of BN keys and values into rings of STAGES buffers each, as soon
//                      as a buffer is free: those of the next item start while this one is computed
//   warp 1             in a tile's last block, zeroes the values past the tile's keys once they have landed. They are
//                      somebody else's, their weights are 0, and 0 x NaN is NaN. Keys there do no harm: their scores
//                      are replaced by the mask, not multiplied.
//   consumers          from a tile's last block to its first: S = Q K^T of this block and O += P V of the one before
//                      are issued together; the softmax of S runs while O is still summed. Consumers take turns to
//                      issue, so that one's softmax runs beside another's products.
//
// Documents of few rows (tile_table.h) are served by a second launch with one consumer a block and several blocks a
// multiprocessor, so that no warpgroup computes for nobody. Its tiles hold S = 1 << stack query heads of one key head:
// row m of a tile is row m / S of the document and head m % S of these. Which launch serves a document depends on its
// own rows alone, and S on the numbers of heads.
//
// The structure is that of FlashAttention-3 (Shah et al., 2024). Softmax: Dao, FlashAttention-2, 2023, algorithm 1.
// Blocks of keys start at the tile's first key, and rows decide alone: no result depends on what else is packed.
#pragma once
#include "hopper_common.cuh"

namespace packattn::cuda {

// D, DV: columns of query/key and value/out in shared memory. BM rows of a tile, BN keys of a block, BLOCKS of threads
// on a multiprocessor.
template <int D_, int DV_, int BM, int BN, int STAGES_, int BLOCKS = 1>
struct HopperForwardShape : hopper::Ring<STAGES_> {
  static constexpr int D = D_, DV = DV_, kRows = BM, kKeys = BN, STAGES = STAGES_, kBlocks = BLOCKS;
  static constexpr int kConsumers = BM / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr bool kStacked = kConsumers == 1;  // for documents of few rows
  // Of a thread. The block is launched with equal shares; the copier gives its away.
  static constexpr int kShare = 65536 / (kThreads * BLOCKS) / 8 * 8;
  static constexpr int kCopierRegisters = kConsumers == 3 || BLOCKS == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters =
      kConsumers == 3 ? 160 : (kConsumers == 2 ? 232 : 2 * kShare - kCopierRegisters);

  static constexpr int kQueryPanel = BM * 128, kPanel = BN * 128;
  static constexpr int kQueryBytes = D / 64 * kQueryPanel;
  static constexpr int kKeyBytes = D / 64 * kPanel, kValueBytes = DV / 64 * kPanel;
  static constexpr int kKeyRing = kQueryBytes, kValueRing = kKeyRing + STAGES * kKeyBytes;

  // mbarriers. Full: has landed; empty: has been read; landed: the values are there, but those past the tile's keys are
  // still to be zeroed.
  static constexpr int kQueryFull = kValueRing + STAGES * kValueBytes, kQueryEmpty = kQueryFull + 8;
  static constexpr int kKeyFull = kQueryEmpty + 8, kKeyEmpty = kKeyFull + 8 * STAGES;
  static constexpr int kValueFull = kKeyEmpty + 8 * STAGES, kValueEmpty = kValueFull + 8 * STAGES;
  static constexpr int kValueLanded = kValueEmpty + 8 * STAGES;
  static constexpr int kSharedBytes = kValueLanded + 8 * STAGES;

  static_assert(D % 64 == 0 && DV % 64 == 0 && BM % 64 == 0 && BN % 16 == 0 && BN <= 256);
  static_assert(kConsumers >= 1 && kConsumers <= 3);
  static_assert(STAGES >= 2 && BLOCKS * (kSharedBytes + 1024) <= 228 * 1024);

  // Parts that the columns of out are summed in. ptxas wants the operands of one product to fit the registers at
  // launch, whatever setmaxnreg says later.
  static constexpr int kParts = kStacked && DV > 128 ? 2 : 1;

  // log2 of the heads that share a tile, a constant where none do.
  PACKATTN_DEVICE static int heads_log2(int stack) { return kStacked ? stack : 0; }
  // Blocks of keys that a tile sees.
  PACKATTN_DEVICE static int blocks(const Tile& tile) {
    return tile.begin < tile.end ? (tile.end - tile.begin + BN - 1) / BN : 0;
  }
};

namespace hopper {

// Warp 0, one lane. Keys go one block ahead of values, which is the order of use.
template <class Shape>
PACKATTN_DEVICE void copy_items(const ForwardTask& task, int stack, const TmaMap* query, const TmaMap* key,
                                const TmaMap* value) {
  constexpr int BN = Shape::kKeys;
  const uint32_t base = ptx::smem_base();
  const int count = ptx::load_global(task.tiles.count), stacks = task.heads_q >> Shape::heads_log2(stack);
  int items = 0, uses = 0;  // of Q, and of the ring of keys; that of values follows
  for (forward::Item item = first_item(stacks); item.tile < count; item.advance(stacks)) {
    const Tile tile = tile_of(task.tiles, item.tile);
    const int blocks = Shape::blocks(tile);
    const int head = item.head() << Shape::heads_log2(stack), head_k = head / (task.heads_q / task.heads_k);
    if (blocks == 0) continue;
    ptx::mbarrier_wait(base + Shape::kQueryEmpty, static_cast<uint32_t>(items) % 2 ^ 1);
    ++items;
    copy_panels<Shape::D, Shape::kRows>(base, query, base + Shape::kQueryFull, head, tile.row);
    for (int n = blocks; n >= 0; --n) {
      if (n > 0) {
        const uint32_t stage = Shape::stage(uses);
        ptx::mbarrier_wait(base + Shape::kKeyEmpty + stage * 8, Shape::parity(uses) ^ 1);
        copy_panels<Shape::D, BN>(base + Shape::kKeyRing + stage * Shape::kKeyBytes, key,
                                  base + Shape::kKeyFull + stage * 8, head_k, tile.begin + (n - 1) * BN);
        ++uses;
      }
      if (n < blocks) {
        const int use = n > 0 ? uses - 2 : uses - 1;  // that of block n
        const uint32_t stage = Shape::stage(use);
        const bool whole = tile.end - tile.begin >= (n + 1) * BN;
        ptx::mbarrier_wait(base + Shape::kValueEmpty + stage * 8, Shape::parity(use) ^ 1);
        copy_panels<Shape::DV, BN>(base + Shape::kValueRing + stage * Shape::kValueBytes, value,
                                   base + (whole ? Shape::kValueFull : Shape::kValueLanded) + stage * 8, head_k,
                                   tile.begin + n * BN);
      }
    }
  }
}

// Warp 1.
template <class Shape>
PACKATTN_DEVICE void zero_foreign_values(const ForwardTask& task, int stack, int lane) {
  constexpr int BN = Shape::kKeys;
  const uint32_t base = ptx::smem_base();
  const int count = ptx::load_global(task.tiles.count), stacks = task.heads_q >> Shape::heads_log2(stack);
  int uses = 0;
  uint32_t parities = 0;  // bit s: of the phase to wait for in stage s; not every use of a stage has one
  for (forward::Item item = first_item(stacks); item.tile < count; item.advance(stacks)) {
    const Tile tile = tile_of(task.tiles, item.tile);
    const int blocks = Shape::blocks(tile);
    if (blocks == 0) continue;
    const int own = tile.end - tile.begin - (blocks - 1) * BN;
    if (own < BN) {
      const uint32_t stage = Shape::stage(uses), values = base + Shape::kValueRing + stage * Shape::kValueBytes;
      ptx::mbarrier_wait(base + Shape::kValueLanded + stage * 8, parities >> stage & 1);
      parities ^= 1u << stage;
      zero_rows<Shape::DV, BN>(values, own, lane);
      ptx::fence_proxy_async();  // wgmma is to see the zeros
      ptx::warp_sync();
      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kValueFull + stage * 8);
    }
    uses += blocks;
  }
}

// One block of scores s becomes weights; m (the maximum of the scores, times `factor`) and l follow. o is to be
// multiplied by `correction`, which is exactly 1 where the maximum stays: m is kept as it was rounded, since nvcc
// contracts a product and a difference, and what rounding took off would come in anew with every block.
template <bool MASK, int N>
PACKATTN_DEVICE void softmax(float (&s)[N], float (&m)[2], float (&l)[2], float (&correction)[2], const int (&begin)[2],
                             const int (&end)[2], int first_key, float factor) {
  if constexpr (MASK) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
      if (column < begin[r] - first_key || column >= end[r] - first_key) s[i] = -INFINITY;
    }
  }
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float a = s[2 * r], b = s[2 * r + 1];
#pragma unroll
    for (int i = 4; i < N; i += 4) {
      a = fmaxf(a, s[i + 2 * r]);
      b = fmaxf(b, s[i + 2 * r + 1]);
    }
    a = fmaxf(a, b);
    a = fmaxf(a, ptx::shfl_xor(a, 1));
    a = fmaxf(a, ptx::shfl_xor(a, 2));
    a = fmaxf(m[r], a * factor);
    reference[r] = MASK && a == -INFINITY ? 0.f : a;  // a row that has seen nothing yet
    correction[r] = ptx::ex2(m[r] - reference[r]);
    m[r] = a;
    l[r] *= correction[r];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] = ptx::ex2(s[i] * factor - reference[i / 2 % 2]);
    l[i / 2 % 2] += s[i];
  }
}

// What a thread of consumer `group` has of one item: two rows (lane / 4 and 8 more of its warp's 16).
template <class T, class Shape, bool SOFTCAP>
struct Consumer {
  static constexpr int D = Shape::D, DV = Shape::DV, BN = Shape::kKeys, PARTS = Shape::kParts;
  static constexpr int COLUMNS = DV / PARTS;  // of a part

  uint32_t base;
  int group, lane;
  float factor, inner_factor;
  int uses = 0;          // blocks whose scores are done, over all items; values run one behind
  int begin[2], end[2];  // the rows' ranges, less this lane's first column
  float m[2], l[2];
  float o[PARTS][COLUMNS / 2], s[BN / 2];
  uint32_t weights[BN / 16][4];

  PACKATTN_DEVICE void wait_keys() {
    ptx::mbarrier_wait(base + Shape::kKeyFull + Shape::stage(uses) * 8, Shape::parity(uses));
  }
  PACKATTN_DEVICE void wait_values() {
    ptx::mbarrier_wait(base + Shape::kValueFull + Shape::stage(uses - 1) * 8, Shape::parity(uses - 1));
  }
  PACKATTN_DEVICE void free_keys() {
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kKeyEmpty + Shape::stage(uses) * 8);
  }
  PACKATTN_DEVICE void free_values() {
    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kValueEmpty + Shape::stage(uses - 1) * 8);
  }

  // s = Q K^T, both K-major: 16 columns are 32 bytes inside a panel.
  PACKATTN_DEVICE void multiply_keys() {
    const uint64_t query = matrix_descriptor(base + group * 64 * 128, 16, 1024, Swizzle::bytes128);
    const uint64_t keys =
        matrix_descriptor(base + Shape::kKeyRing + Shape::stage(uses) * Shape::kKeyBytes, 16, 1024, Swizzle::bytes128);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      ptx::wgmma_ss<T, false, false>(s, advance(query, i / 4 * Shape::kQueryPanel + i % 4 * 32),
                                     advance(keys, i / 4 * Shape::kPanel + i % 4 * 32), i > 0);
    }
    ptx::wgmma_commit();
  }
  // o += P V, V MN-major: 16 keys are 2048 bytes, from panel to panel it is the descriptor's leading offset.
  PACKATTN_DEVICE void multiply_values() {
    const uint64_t values = matrix_descriptor(base + Shape::kValueRing + Shape::stage(uses - 1) * Shape::kValueBytes,
                                              Shape::kPanel, 1024, Swizzle::bytes128);
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        ptx::wgmma_rs<T, true>(o[part], weights[i], advance(values, part * COLUMNS / 64 * Shape::kPanel + i * 2048),
                               true);
      }
    }
    ptx::wgmma_commit();
  }
  PACKATTN_DEVICE void wait_output() {
    if constexpr (PARTS == 1) {
      ptx::wgmma_wait<0>(o[0]);
    } else {
      ptx::wgmma_wait<0>(o[0], o[1]);
    }
  }
  // Row r of this thread: its accumulators times `factor[r]`.
  PACKATTN_DEVICE void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) o[part][i] *= factor[i / 2 % 2];
    }
  }
  template <bool MASK>
  PACKATTN_DEVICE void weigh(int first_key, float (&correction)[2]) {
    if constexpr (SOFTCAP) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) s[i] = tile::tanh_scaled(s[i] * inner_factor);
    }
    softmax<MASK>(s, m, l, correction, begin, end, first_key, factor);
  }
  PACKATTN_DEVICE void pack_weights() { pack_operands<T>(weights, s); }

  // The scores of an item's first block, which is masked: nothing is known of it.
  PACKATTN_DEVICE void start(int first_key) {
    float correction[2];
    wait_keys();
    ptx::wgmma_fence();
    multiply_keys();
    ptx::wgmma_wait<0>(s);
    free_keys();
    weigh<true>(first_key, correction);
    pack_weights();
    ++uses;
  }
  // The scores of this block, the values of the one before.
  template <bool MASK>
  PACKATTN_DEVICE void step(int first_key) {
    constexpr int CONSUMERS = Shape::kConsumers;
    float correction[2];
    wait_keys();
    if constexpr (CONSUMERS > 1) {
      ptx::named_sync(1 + group, 256);  // my turn
      ptx::turn(group, CONSUMERS, true);
    }
    ptx::wgmma_fence();
    multiply_keys();
    wait_values();
    ptx::wgmma_fence();
    multiply_values();
    if constexpr (CONSUMERS > 1) {
      ptx::turn(group, CONSUMERS, false);
      ptx::named_arrive(1 + (group + 1 == CONSUMERS ? 0 : group + 1), 256);  // the next one's
    }
    ptx::wgmma_wait<1>(s);
    free_keys();
    weigh<MASK>(first_key, correction);
    ptx::finish_before_here(l[0] + l[1]);  // the exponentials, which are to run beside P V
    wait_output();
    free_values();
    ++uses;
    pack_weights();
    scale_output(correction);
  }
  PACKATTN_DEVICE void finish() {
    wait_values();
    ptx::wgmma_fence();
    multiply_values();
    wait_output();
    free_values();
  }

  // Sums over the row, sink, lse, out. The tile is read again, which costs less than its registers in the loop.
  PACKATTN_DEVICE void store(const ForwardTask& task, int stack, const forward::Item& item, int warp) {
    const Tile tile = tile_of(task.tiles, item.tile);
    const int heads_log2 = Shape::heads_log2(stack), quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_group = warp * 16 + lane / 4 + 8 * r, in_tile = in_group >> heads_log2;
      const int head = (item.head() << heads_log2) + (in_group & ((1 << heads_log2) - 1));
      const int64_t row = static_cast<int64_t>(tile.row) + in_tile;
      const bool mine = in_tile < tile.rows, sees = begin[r] < end[r];
      float sum = l[r], weight = 1.f, reference = m[r];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (task.sinks != nullptr) {  // one more score, with the value 0
        const float sink = ptx::load_global(task.sinks + head) * tile::kLog2e;
        if (sink > reference) {
          weight = ptx::ex2(reference - sink);
          sum = sum * weight + 1.f;
          reference = sink;
        } else {
          sum += ptx::ex2(sink - reference);
        }
      }
      weight *= ptx::rcp(sum);
      if (mine && quad == 0) {
        ptx::store_global(task.lse + head * task.total_q + row,
                          sees ? (reference + ptx::lg2(sum)) * tile::kLn2 : -INFINITY);
      }
      uint16_t* const to =
          static_cast<uint16_t*>(task.out.data) + head * task.out.head_stride + row * task.out.row_stride;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        store_row<T, COLUMNS>(to + part * COLUMNS, o[part], r, weight, sees, mine, task.head_dim_v - part * COLUMNS,
                              quad);
      }
    }
  }

  // The ranges of the group's 64 rows, cut to the tile's. Returns the keys that all of them see as blocks
  // [first, last) of the tile; the same in all four warps, for they must come to the same wgmma.
  PACKATTN_DEVICE void load_ranges(const ForwardTask& task, int stack, const Tile& tile, int warp, int& first,
                                   int& last) {
    const GroupRanges ranges =
        GroupRanges::load(task.key_begin, task.key_end, tile, group * 64, warp, lane, Shape::heads_log2(stack));
    const int full_begin = ranges.full_begin, full_end = ranges.full_end;
    const int blocks = Shape::blocks(tile);
    last =
        full_end < tile.end ? (full_end > tile.begin ? (full_end - tile.begin) / BN : 0) : (tile.end - tile.begin) / BN;
    first = full_begin >= tile.end ? blocks : (full_begin > tile.begin ? (full_begin - tile.begin + BN - 1) / BN : 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin[r] = ranges.begin[r] - lane % 4 * 2;
      end[r] = ranges.end[r] - lane % 4 * 2;
    }
  }
};

}  // namespace hopper

// stack: log2 of the heads that share a tile; 0 unless Shape::kStacked.
template <class T, class Shape, bool SOFTCAP>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    hopper_forward_kernel(const __grid_constant__ TmaMap query, const __grid_constant__ TmaMap key,
                          const __grid_constant__ TmaMap value, const __grid_constant__ ForwardArguments task,
                          const int stack) {
  constexpr int BN = Shape::kKeys, CONSUMERS = Shape::kConsumers;
  const int thread = ptx::thread_index(), lane = thread % 32, warp = forward::uniform(thread / 32);
  const uint32_t base = ptx::smem_base();
  if (thread == 0) {
    ptx::mbarrier_init(base + Shape::kQueryFull, 1);
    ptx::mbarrier_init(base + Shape::kQueryEmpty, 4 * CONSUMERS);
    for (int i = 0; i < Shape::STAGES; ++i) {
      ptx::mbarrier_init(base + Shape::kKeyFull + i * 8, 1);
      ptx::mbarrier_init(base + Shape::kKeyEmpty + i * 8, 4 * CONSUMERS);
      ptx::mbarrier_init(base + Shape::kValueFull + i * 8, 1);
      ptx::mbarrier_init(base + Shape::kValueEmpty + i * 8, 4 * CONSUMERS);
      ptx::mbarrier_init(base + Shape::kValueLanded + i * 8, 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (warp < 4) {
    ptx::registers_decrease<Shape::kCopierRegisters>();
    if (warp == 0 && lane == 0) hopper::copy_items<Shape>(task, stack, &query, &key, &value);
    if (warp == 1) hopper::zero_foreign_values<Shape>(task, stack, lane);
    return;
  }
  ptx::registers_increase<Shape::kConsumerRegisters>();
  hopper::Consumer<T, Shape, SOFTCAP> consumer;
  consumer.base = base;
  consumer.group = warp / 4 - 1;
  consumer.lane = lane;
  consumer.factor = task.factor;
  consumer.inner_factor = task.inner_factor;
  if constexpr (CONSUMERS > 1) {
    if (consumer.group == CONSUMERS - 1) ptx::named_arrive(1, 256);  // the first turn is group 0's
  }
  uint32_t items = 0;
  const int stacks = task.heads_q >> Shape::heads_log2(stack);
  forward::Item item = hopper::first_item(stacks);
  for (; item.tile < forward::uniform(ptx::load_global(task.tiles.count)); item.advance(stacks)) {
    const Tile tile = forward::load_tile(task.tiles.tiles + item.tile);
    int first = 0, last = 0;
    consumer.load_ranges(task, stack, tile, warp, first, last);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      consumer.m[r] = -INFINITY;
      consumer.l[r] = 0.f;
    }
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < Shape::DV / Shape::kParts / 2; ++i) consumer.o[part][i] = 0.f;
    }
    const int blocks = Shape::blocks(tile);
    if (blocks > 0) {
      ptx::mbarrier_wait(base + Shape::kQueryFull, items % 2);
      ++items;
      int n = blocks - 1;
      consumer.start(tile.begin + n * BN);
      for (--n; n >= last && n >= 0; --n) consumer.template step<true>(tile.begin + n * BN);
      for (; n >= first; --n) consumer.template step<false>(tile.begin + n * BN);
      for (; n >= 0; --n) consumer.template step<true>(tile.begin + n * BN);
      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kQueryEmpty);  // all products with Q are done
      consumer.finish();
    }
    consumer.store(task, stack, item, warp - 4);
  }
  if constexpr (CONSUMERS > 1) {
    if (consumer.group == 0) ptx::named_sync(1, 256);  // takes the turn that nobody else will
  }
}

}  // namespace packattn::cuda
