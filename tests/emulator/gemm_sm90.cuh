// C[M, N] = A[M, K] B, a tile of 64 x 64 per block, as small as a Hopper kernel gets: warp 4 copies by TMA into a ring
// of stages, warps 0 to 3 multiply by wgmma. For the emulator's own tests.
#pragma once
#include "../../csrc/cuda/ptx_sm90.cuh"

namespace packattn::cuda {

struct GemmShape {
  static constexpr int kThreads = 160, kStages = 3, kTileBytes = 64 * 64 * 2;
  static constexpr int kBarriers = kStages * 2 * kTileBytes, kSharedBytes = kBarriers + 2 * kStages * 8;
};

// B is [N, K], or [K, N] if B_MN. Maps have boxes of 64 x 64 and the swizzle of 128 bytes.
template <class T, bool B_MN>
__global__ void __launch_bounds__(GemmShape::kThreads)
    gemm_sm90(const __grid_constant__ TmaMap map_a, const __grid_constant__ TmaMap map_b, float* c, int m, int n,
              int k) {
  using S = GemmShape;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row0 = static_cast<int>(blockIdx.x) * 64, column0 = static_cast<int>(blockIdx.y) * 64;
  const int steps = (k + 63) / 64;
  const uint32_t base = ptx::smem_base(), full = base + S::kBarriers, empty = full + S::kStages * 8;
  if (thread == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      ptx::mbarrier_init(full + s * 8, 1);
      ptx::mbarrier_init(empty + s * 8, 4);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (warp == 4) {
    if (lane != 0) return;
    for (int i = 0; i < steps; ++i) {
      const int stage = i % S::kStages;
      const uint32_t a = base + stage * 2 * S::kTileBytes, b = a + S::kTileBytes;
      ptx::mbarrier_wait(empty + stage * 8, (i / S::kStages & 1) ^ 1);
      ptx::mbarrier_arrive_expect(full + stage * 8, 2 * S::kTileBytes);
      ptx::tma_load_2d(a, &map_a, full + stage * 8, i * 64, row0);
      ptx::tma_load_2d(b, &map_b, full + stage * 8, B_MN ? column0 : i * 64, B_MN ? i * 64 : column0);
    }
    return;
  }
  float sum[32];
#pragma unroll
  for (float& x : sum) x = 0.f;
  for (int i = 0; i < steps; ++i) {
    const int stage = i % S::kStages;
    const uint32_t a = base + stage * 2 * S::kTileBytes, b = a + S::kTileBytes;
    ptx::mbarrier_wait(full + stage * 8, i / S::kStages & 1);
    ptx::wgmma_fence();
    const uint64_t from_a = matrix_descriptor(a, 16, 1024, Swizzle::bytes128);
    const uint64_t from_b = matrix_descriptor(b, 16, 1024, Swizzle::bytes128);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::wgmma_ss<T, false, B_MN>(sum, advance(from_a, j * 32), advance(from_b, j * (B_MN ? 2048 : 32)),
                                    i > 0 || j > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>(sum);  // the step before has been read
    if (i > 0 && lane == 0) ptx::mbarrier_arrive(empty + (i - 1) % S::kStages * 8);
  }
  ptx::wgmma_wait<0>(sum);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = row0 + warp * 16 + lane / 4 + 8 * (i / 2 % 2), column = column0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < m && column < n) ptx::store_global(c + static_cast<size_t>(row) * n + column, sum[i]);
  }
}

}  // namespace packattn::cuda
