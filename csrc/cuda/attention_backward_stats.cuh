// Row statistics of the backward, and the gradient of the sinks.
//
// For query row i of a head: {lse * log2 e, delta}, delta = rowsum(dout * out) - dlse. The gradient of lse is P * dlse,
// so it only moves delta. A row that sees nothing gets {infinity, 0}: every probability 2^(x - infinity) is 0.
// Layout: float2 [Hq, Tq], so that the rows of a tile lie side by side.
#pragma once
#include <cmath>

#include "kernels.h"
#include "mma_tile.cuh"

namespace packattn::cuda {

constexpr int kStatsThreads = 128, kStatsLanes = 8;  // lanes that share a row
constexpr int kSinkThreads = 256, kSinkSharedBytes = kSinkThreads / 32 * 8;

// Rows of head 0, then of head 1, ...: block b takes kStatsThreads / kStatsLanes rows at b, b + grid, ...
template <class T>
__global__ void __launch_bounds__(kStatsThreads) attention_backward_stats(BackwardTask task) {
  constexpr int ROWS = kStatsThreads / kStatsLanes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kStatsLanes;
  const int64_t total = task.total_q * task.heads_q;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * ROWS; first < total;
       first += static_cast<int64_t>(gridDim.x) * ROWS) {
    const int64_t item = first + thread / kStatsLanes;
    const int64_t head = item / task.total_q, row = item - head * task.total_q;
    bool sees = false;
    float delta = 0.f;
    if (item < total) {
      const int32_t begin = ptx::load_global(task.key_begin + row), end = ptx::load_global(task.key_end + row);
      sees = (begin > 0 ? begin : 0) < (end < task.total_k ? end : task.total_k);
    }
    if (sees) {
      const uint16_t* out =
          static_cast<const uint16_t*>(task.out.data) + row * task.out.row_stride + head * task.out.head_stride;
      const uint16_t* dout =
          static_cast<const uint16_t*>(task.dout.data) + row * task.dout.row_stride + head * task.dout.head_stride;
      for (int at = lane * 8; at < task.head_dim_v; at += kStatsLanes * 8) {
        const uint4 a = ptx::load_global(reinterpret_cast<const uint4*>(out + at));
        const uint4 b = ptx::load_global(reinterpret_cast<const uint4*>(dout + at));
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 u = ptx::unpack2<T>(x[i]), w = ptx::unpack2<T>(y[i]);
          delta += u.x * w.x;
          delta += u.y * w.y;
        }
      }
    }
#pragma unroll
    for (int mask = 1; mask < kStatsLanes; mask *= 2) delta += ptx::shfl_xor(delta, mask);
    if (lane == 0 && item < total) {
      float2 stats = {INFINITY, 0.f};
      if (sees) {
        stats.x = ptx::load_global(task.lse + item) * tile::kLog2e;
        stats.y = task.dlse == nullptr ? delta : delta - ptx::load_global(task.dlse + item);
      }
      ptx::store_global(static_cast<float2*>(task.scratch) + item, stats);
    }
  }
}

// dsink = -sum over the rows that see anything of exp(sink - lse) * delta: a sink is one more key whose value is 0.
// One block per head, reads the statistics; sums in an order that depends on total_q alone, with the rounding error of
// every addition carried along (Kahan, 1965), since a long packing has more rows than float32 has digits.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) attention_backward_sinks(BackwardTask task) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t head = blockIdx.x;
  const float2* stats = static_cast<const float2*>(task.scratch) + head * task.total_q;
  const float sink = ptx::load_global(task.sinks + head) * tile::kLog2e;
  float sum = 0.f, carry = 0.f;
  for (int64_t row = thread; row < task.total_q; row += THREADS) {
    const float2 x = ptx::load_global(stats + row);
    if (x.x == INFINITY && x.y == 0.f) continue;  // sees nothing
    const float term = ptx::ex2(sink - x.x) * x.y - carry, next = sum + term;
    carry = (next - sum) - term;
    sum = next;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
  const uint32_t base = ptx::smem_base();
  if (lane == 0) ptx::sts32(base + warp * 4, ptx::fbits(sum));
  ptx::block_sync();
  if (warp == 0) {
    sum = lane < THREADS / 32 ? ptx::bitsf(ptx::lds32(base + lane * 4)) : 0.f;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
    if (lane == 0) ptx::store_global(task.dsinks + head, -sum);
  }
}

}  // namespace packattn::cuda
