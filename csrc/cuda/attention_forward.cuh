// Attention forward on tensor cores, compute capability 8.0 and later.
//
// A block of WARPS warps serves work items: a tile of the tile table (up to kRows query rows of one document) and a
// query head. A warp owns MT * 16 of the rows, all keys, so that nothing is exchanged between warps. Keys and values
// come through one ring of SLOTS buffers in the order K0 V0 K1 V1 ..., BN keys each, by asynchronous copies that run
// SLOTS - 1 steps ahead of their use; a step is S = Q K^T (with the softmax of S behind it) or O += P V, and starts
// with the one barrier that both tells that its buffer has landed and that everybody is done with the buffer before it.
//
// Softmax: Dao et al., FlashAttention-2, 2023, algorithm 1, with weights 2^(score - m) whose reference m follows the
// row's maximum only when that has grown by more than 2^kLazy (as in FlashAttention-4; weights stay below 2^kLazy,
// which neither dtype nor the float32 sums mind). A row decides alone, so no result depends on what shares its tile.
#pragma once
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "mma_tile.cuh"

namespace packattn::cuda {

// D, DV: columns of query/key and value/out in shared memory. REGISTERS: Q is kept in registers, not read again a step.
template <int D_, int DV_, int WARPS, int MT_, int BN, int SLOTS_, bool REGISTERS, int BLOCKS>
struct ForwardShape {
  static constexpr int D = D_, DV = DV_, MT = MT_, kKeys = BN, SLOTS = SLOTS_;
  static constexpr bool kQueryInRegisters = REGISTERS;
  static constexpr int kThreads = WARPS * 32, kWarpRows = MT * 16, kRows = WARPS * kWarpRows;
  static constexpr int kBlocks = BLOCKS;  // a multiprocessor has registers for
  static constexpr int kAhead = SLOTS - 1;

  // The ring alternates between keys and values. An even number of slots gives each its own size.
  static constexpr int kKeyBytes = tile::matrix_bytes(BN, D), kValueBytes = tile::matrix_bytes(BN, DV);
  static constexpr int kLarger = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  __host__ __device__ static constexpr int slot(int i) {
    return SLOTS % 2 ? i * kLarger : i / 2 * (kKeyBytes + kValueBytes) + i % 2 * kKeyBytes;
  }
  static constexpr int kRing = tile::matrix_bytes(kRows, D);
  static constexpr int kRanges = kRing + slot(SLOTS);
  static constexpr int kSharedBytes = kRanges + kRows * 8;

  static_assert(DV <= D, "a warp's output is staged in its own query rows");
  static_assert(SLOTS >= 2 && BN % 16 == 0 && kRing % 128 == 0 && slot(1) % 128 == 0);
};

namespace forward {

constexpr float kLazy = 8.f;
constexpr float kLowest = -3.402823466e38f;

// The weights of one block of scores s (in units of log2 once multiplied by `factor`) replace them; m, l and o follow.
// m starts as the lowest finite number: masked scores, -inf, then have weight 0 with no case of their own.
template <int MT, int NT, int NO>
PACKATTN_DEVICE void softmax(float (&s)[MT][NT][4], float (&m)[MT][2], float (&l)[MT][2], float (&o)[MT][NO][4],
                             float factor) {
  float top[MT][2];
  bool any = false;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = s[i][0][2 * r];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) x = fmaxf(x, s[i][n][2 * r + j]);
      }
      x = fmaxf(x, ptx::shfl_xor(x, 1));
      x = fmaxf(x, ptx::shfl_xor(x, 2));
      top[i][r] = x * factor;
      any |= top[i][r] > m[i][r] + kLazy;
    }
  }
  if (ptx::any_lane(any)) {  // saves multiplications by 1, decides nothing
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool grown = top[i][r] > m[i][r] + kLazy;
        const float correction = grown ? ptx::ex2(m[i][r] - top[i][r]) : 1.f;
        m[i][r] = grown ? top[i][r] : m[i][r];
        l[i][r] *= correction;
#pragma unroll
        for (int n = 0; n < NO; ++n) {
          o[i][n][2 * r] *= correction;
          o[i][n][2 * r + 1] *= correction;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][n][j] = ptx::ex2(s[i][n][j] * factor - m[i][j / 2]);
        l[i][j / 2] += s[i][n][j];
      }
    }
  }
}

// A number that all lanes hold anyway, in a register that they share (a reduction's result is one).
PACKATTN_DEVICE int uniform(int value) { return ptx::reduce_max(value); }

PACKATTN_DEVICE Tile load_tile(const Tile* tile) {
  const int4 v = ptx::load_global(reinterpret_cast<const int4*>(tile));
  return {uniform(v.x), uniform(v.y), uniform(v.z), uniform(v.w)};
}

// A tile and a head. Item r * blocks + b is block b's in round r; every other round counts b backwards, so that the
// block which got the longest item of a round gets the shortest of the next.
struct Item {
  int tile;
  int turn;  // 2 * head + round % 2: one register

  PACKATTN_DEVICE int head() const { return turn / 2; }
  PACKATTN_DEVICE void advance(int heads) {
    const int blocks = static_cast<int>(gridDim.x), block = ptx::block_index();
    const int step = turn % 2 ? 2 * block + 1 : 2 * (blocks - block) - 1;
    const int next = turn / 2 + step % heads;
    const bool wraps = next >= heads;
    tile += step / heads + wraps;
    turn = 2 * (wraps ? next - heads : next) + (turn % 2 == 0);
  }
};

// The end of an item: sums over the row, sink, lse, out. Everything but the arguments is worked out again: registers.
template <class T, class Shape, int MT, int NO>
PACKATTN_DEVICE void store_item(const ForwardTask& task, const Item& item, float (&o)[MT][NO][4],
                                const float (&m)[MT][2], const float (&l)[MT][2]) {
  const int warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const uint32_t base = ptx::smem_base(), ranges = base + Shape::kRanges + warp * Shape::kWarpRows * 8;
  const Tile tile = load_tile(task.tiles.tiles + item.tile);
  const int head = item.head();
  const int rows = tile.rows - warp * Shape::kWarpRows;
  const int64_t first_row = static_cast<int64_t>(tile.row) + warp * Shape::kWarpRows;
  float* const lse = task.lse + head * task.total_q + first_row;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = i * 16 + lane / 4 + 8 * r;
      float sum = l[i][r], weight = 1.f, reference = m[i][r];
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
      const float2 range = ptx::lds64(ranges + row * 8);
      const bool sees = ptx::fint(range.x) < ptx::fint(range.y);
      weight *= ptx::rcp(sum);
      if (lane % 4 == 0 && row < rows) {
        ptx::store_global(lse + row, sees ? (reference + ptx::lg2(sum)) * tile::kLn2 : -INFINITY);
      }
#pragma unroll
      for (int n = 0; n < NO; ++n) {
        o[i][n][2 * r] = sees ? o[i][n][2 * r] * weight : 0.f;
        o[i][n][2 * r + 1] = sees ? o[i][n][2 * r + 1] * weight : 0.f;
      }
    }
  }
  tile::store_rows<T, Shape::D>(
      o, 1.f, base + warp * tile::matrix_bytes(Shape::kWarpRows, Shape::D),
      static_cast<uint16_t*>(task.out.data) + head * task.out.head_stride + first_row * task.out.row_stride,
      task.out.row_stride, rows, task.head_dim_v, lane);
}

}  // namespace forward

// What the host works out once: in a kernel's parameters it costs no register.
struct ForwardArguments : ForwardTask {
  float factor;        // scores in units of log2: s * factor, or with a soft cap
  float inner_factor;  // tanh_scaled(s * inner_factor) * factor

  explicit ForwardArguments(const ForwardTask& task)
      : ForwardTask(task),
        factor(tile::kLog2e * (task.softcap > 0 ? task.softcap : task.scale)),
        inner_factor(task.softcap > 0 ? 2.f * tile::kLog2e * (task.scale / task.softcap) : 0.f) {}
};

template <class T, class Shape, bool SOFTCAP>
__global__ void __launch_bounds__(Shape::kThreads) attention_forward_kernel(ForwardArguments task) {
  constexpr int D = Shape::D, DV = Shape::DV, MT = Shape::MT, BN = Shape::kKeys, SLOTS = Shape::SLOTS;
  constexpr int THREADS = Shape::kThreads, WARP_ROWS = Shape::kWarpRows, AHEAD = Shape::kAhead;
  const uint32_t base = ptx::smem_base(), ring = base + Shape::kRing;

  forward::Item item = {ptx::block_index() / task.heads_q, ptx::block_index() % task.heads_q * 2};
  for (; item.tile < forward::uniform(ptx::load_global(task.tiles.count)); item.advance(task.heads_q)) {
    const int thread = ptx::thread_index(), warp = thread / 32, lane = thread % 32;
    const uint32_t warp_query = base + warp * tile::matrix_bytes(WARP_ROWS, D);
    const uint32_t warp_ranges = base + Shape::kRanges + warp * WARP_ROWS * 8;
    const uint32_t query_lane = warp_query + tile::lane_a<D>(lane);
    const uint32_t key_lane = ring + tile::lane_b<D>(lane), value_lane = ring + tile::lane_a<DV>(lane);
    const Tile tile = forward::load_tile(task.tiles.tiles + item.tile);
    const int head = item.head();
    const int end = tile.end;
    int first_key = tile.begin;
    tile::Source keys = tile::source_at<D>(task.key.data, task.key.row_stride, task.key.head_stride,
                                           head / (task.heads_q / task.heads_k), first_key, task.head_dim, thread);
    tile::Source values = tile::source_at<DV>(task.value.data, task.value.row_stride, task.value.head_stride,
                                              head / (task.heads_q / task.heads_k), first_key, task.head_dim_v, thread);
    // Starts copying what is `ahead` of the step at first_key: an even number keys, an odd number values.
    const auto copy_ahead = [&]<int ahead>(std::integral_constant<int, ahead>, int slot) {
      const int left = end - first_key - ahead / 2 * BN;
      if (left > 0) {
        if constexpr (ahead % 2 == 0) {
          tile::copy_rows<D, BN, THREADS>(ring + slot, keys, left);
        } else {
          tile::copy_rows<DV, BN, THREADS>(ring + slot, values, left);
        }
      }
      ptx::cp_async_commit();
    };

    ptx::block_sync();  // everybody is done with the shared memory of the item before
    if (first_key < end) {
      tile::Source queries = tile::source_at<D>(task.query.data, task.query.row_stride, task.query.head_stride, head,
                                                tile.row, task.head_dim, thread);
      tile::copy_rows<D, Shape::kRows, THREADS>(base, queries, tile.rows);
    }
    int slots[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) slots[i] = Shape::slot(i);
    copy_ahead(std::integral_constant<int, 0>(), slots[0]);
    if constexpr (AHEAD > 1) copy_ahead(std::integral_constant<int, 1>(), slots[1]);
    if constexpr (AHEAD > 2) copy_ahead(std::integral_constant<int, 2>(), slots[2]);
    const tile::Span span = tile::load_ranges<WARP_ROWS>(warp_ranges, task.key_begin + tile.row + warp * WARP_ROWS,
                                                         task.key_end + tile.row + warp * WARP_ROWS,
                                                         tile.rows - warp * WARP_ROWS, first_key, end, lane);
    ptx::warp_sync();
    // Lane i of a warp watches bound i, which is one register instead of four: bit i of `passed` says whether the block
    // of keys that begins at first_key lies beyond it.
    const int bound = lane == 0   ? span.some_begin - BN
                      : lane == 1 ? span.some_end - 1
                      : lane == 2 ? span.full_begin - 1
                                  : span.full_end - BN;

    float o[MT][DV / 8][4], m[MT][2], l[MT][2];
    tile::zero(o);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m[i][r] = forward::kLowest;
        l[i][r] = 0.f;
      }
    }
    uint32_t q[Shape::kQueryInRegisters ? MT : 1][D / 16][4];
    if (first_key < end) {
      ptx::cp_async_wait<AHEAD - 1>();
      ptx::block_sync();  // Q and the first keys are there
      if constexpr (Shape::kQueryInRegisters) tile::load_a<D>(q, query_lane);
    }
    while (first_key < end) {
      const uint32_t passed = ptx::ballot(first_key > bound);
      const bool some = (passed & 3) == 1, all = (passed & 12) == 4;
      copy_ahead(std::integral_constant<int, AHEAD>(), slots[AHEAD]);
      uint32_t weights[MT][BN / 16][4];
      if (some) {
        float s[MT][BN / 8][4];
        tile::zero(s);
        if constexpr (Shape::kQueryInRegisters) {
          tile::multiply_rows<T, D, D / 16>(s, q, key_lane + slots[0]);
        } else {
          tile::multiply_rows<T, D, D / 16>(s, query_lane, key_lane + slots[0]);
        }
        if constexpr (SOFTCAP) {
#pragma unroll
          for (int i = 0; i < MT; ++i) {
#pragma unroll
            for (int n = 0; n < BN / 8; ++n) {
#pragma unroll
              for (int j = 0; j < 4; ++j) s[i][n][j] = tile::tanh_scaled(s[i][n][j] * task.inner_factor);
            }
          }
        }
        if (!all) {
          const int thread = ptx::thread_index();  // of use here only: not in a register between two masks
          tile::mask(s, base + Shape::kRanges + thread / 32 * WARP_ROWS * 8, first_key, -INFINITY, thread % 32);
        }
        forward::softmax(s, m, l, o, task.factor);
        tile::as_operand<T>(weights, s);
      }
      ptx::cp_async_wait<AHEAD - 1>();
      ptx::block_sync();  // the values are there, the keys are used up
      copy_ahead(std::integral_constant<int, AHEAD + 1>(), slots[0]);
      if (some) tile::multiply_columns<T, DV>(o, weights, value_lane + slots[1]);
      // The ring moves on by two.
      const int slot0 = slots[0], slot1 = slots[1];
#pragma unroll
      for (int i = 0; i + 2 < SLOTS; ++i) slots[i] = slots[i + 2];
      slots[SLOTS - 2] = slot0;
      slots[SLOTS - 1] = slot1;
      first_key += BN;
      if (first_key < end) {
        ptx::cp_async_wait<AHEAD - 1>();
        ptx::block_sync();  // the next keys are there, the values are used up
      }
    }
    forward::store_item<T, Shape>(task, item, o, m, l);
  }
}

}  // namespace packattn::cuda
