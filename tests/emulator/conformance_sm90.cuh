// The conformance program's Hopper part: mbarriers, bulk tensor copies, wgmma.
#pragma once
#include "../../csrc/cuda/ptx_sm90.cuh"
#include "conformance.h"

// What is compiled for other GPUs than sm_90a holds no bodies: their instructions do not exist there.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PACKATTN_SM90 1
#else
#define PACKATTN_SM90 0
#endif

namespace packattn::cuda::conformance {

// size, box: elements of 16 bits, the contiguous dimension first; the tensor is packed.
inline TmaMap make_map(const void* data, const std::vector<uint32_t>& size, const std::vector<uint32_t>& box,
                       int swizzle) {
  TmaMap map;
  const size_t rank = size.size();
#if defined(__CUDACC__)
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
             "cuTensorMapEncodeTiled");
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  cuuint64_t sizes[5], strides[4], stride = 2;
  cuuint32_t boxes[5], ones[5] = {1, 1, 1, 1, 1};
  for (size_t i = 0; i < rank; ++i) {
    sizes[i] = size[i];
    boxes[i] = box[i];
    stride *= size[i];
    if (i + 1 < rank) strides[i] = stride;
  }
  const CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                         CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes,
             strides, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles[swizzle == 128 ? 3 : swizzle / 32],
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled: " + std::to_string(result));
#else
  map.base = static_cast<const char*>(data);
  map.rank = static_cast<int>(rank);
  map.swizzle = swizzle;
  uint64_t stride = 2;
  for (size_t i = 0; i < rank; ++i) {
    map.size[i] = size[i];
    map.box[i] = box[i];
    map.stride[i] = stride;
    stride *= size[i];
  }
#endif
  return map;
}

// Two boxes of 1024 words, the second partly outside; all of shared memory is printed.
template <int RANK>
__global__ void bulk_copies(const __grid_constant__ TmaMap map, Words w) {
#if PACKATTN_SM90
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base(), barrier = base + 8192;
  if (t == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(barrier, 8192);
    for (int i = 0; i < 2; ++i) {
      if constexpr (RANK == 2) {
        ptx::tma_load_2d(base + static_cast<uint32_t>(i) * 4096, &map, barrier, i * 24, i * 40 - 8);
      } else {
        ptx::tma_load_3d(base + static_cast<uint32_t>(i) * 4096, &map, barrier, i * 24, i * 2 - 1, i * 3);
      }
    }
  }
  ptx::block_sync();
  ptx::mbarrier_wait(barrier, 0);
  for (int i = t; i < 2048; i += 32) ptx::store_global(w.out + i, ptx::lds32(base + static_cast<uint32_t>(i) * 4));
#endif
}

// A number goes from thread to thread and on, a phase each: the parities of eight phases.
static __global__ void mbarrier_phases(Words w) {
#if PACKATTN_SM90
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base(), barrier = base + 1024;
  if (t == 0) {
    ptx::mbarrier_init(barrier, 64);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  ptx::mbarrier_wait(barrier, 1);  // of a fresh barrier: does not wait
  uint32_t x = ptx::load_global(w.in + t);
  for (uint32_t phase = 0; phase < 8; ++phase) {
    const uint32_t half = phase % 2 * 256;
    ptx::sts32(base + half + static_cast<uint32_t>(t) * 4, x);
    ptx::mbarrier_arrive(barrier);
    ptx::mbarrier_wait(barrier, phase % 2);
    x = x * 5 + ptx::lds32(base + half + static_cast<uint32_t>((t + 33) % 64) * 4);
  }
  ptx::store_global(w.out + t, x);
#endif
}

// d = A B over two steps of k, operands wherever the descriptors find them in a region of known numbers. A at 0, B at
// 8192.
template <class T, int N, bool A_MN, bool B_MN, bool REGISTERS>
__global__ void wgmma(Words w) {
#if PACKATTN_SM90
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base();
  for (int i = t; i < 10240; i += 128) ptx::sts32(base + static_cast<uint32_t>(i) * 4, ptx::load_global(w.in + i));
  ptx::fence_proxy_async();
  ptx::block_sync();
  const uint64_t a = matrix_descriptor(base, 16, 1024, Swizzle::bytes128);
  const uint64_t b = matrix_descriptor(base + 8192, B_MN ? 8192 : 16, 1024, Swizzle::bytes128);
  uint32_t registers[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) registers[i / 4][i % 4] = ptx::load_global(w.in + i * 128 + t);
  float d[N / 2];
#pragma unroll
  for (float& x : d) x = 100.f;  // not to be seen in the result
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint64_t from_b = advance(b, i * (B_MN ? 2048 : 32));
    if constexpr (REGISTERS) {
      ptx::wgmma_rs<T, B_MN>(d, registers[i], from_b, i > 0);
    } else {
      ptx::wgmma_ss<T, A_MN, B_MN>(d, advance(a, i * (A_MN ? 2048 : 32)), from_b, i > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) ptx::store_global(w.out + t * (N / 2) + i, ptx::fbits(d[i]));
#endif
}

// Registers go from one warpgroup to the two others; the numbers computed meanwhile are right.
static __global__ void __launch_bounds__(384, 1) register_counts(Words w) {
#if PACKATTN_SM90
  const int t = static_cast<int>(threadIdx.x);
  if (t < 128) {
    ptx::registers_decrease<24>();
  } else {
    ptx::registers_increase<240>();
  }
  ptx::finish_before_here(1.f);
  ptx::finish_before_here(1u);
  ptx::turn(0, 1, true);
  ptx::turn(0, 1, false);
  ptx::store_global(w.out + t, ptx::load_global(w.in + t) * 3);
#endif
}

template <int N>
void run_columns() {
  const std::string n = std::to_string(N);
  const auto run = [](const std::string& name, void (*kernel)(Words), const std::vector<uint32_t>& in) {
    print_exact(name, results(kernel, in, 64 * N, 128, 40960));
  };
  run("wgmma K K " + n, wgmma<f16_t, N, false, false, false>, halves<f16_t>(10240, 30, true));
  run("wgmma K MN " + n, wgmma<bf16_t, N, false, true, false>, halves<bf16_t>(10240, 31, true));
  run("wgmma MN K " + n, wgmma<f16_t, N, true, false, false>, halves<f16_t>(10240, 32, true));
  run("wgmma registers MN " + n, wgmma<f16_t, N, false, true, true>, halves<f16_t>(10240, 33, true));
  run("wgmma registers K " + n, wgmma<bf16_t, N, false, false, true>, halves<bf16_t>(10240, 34, true));
}

inline void run_sm90() {
  print_exact("mbarrier phases", results(mbarrier_phases, random_bits(64, 21), 64, 64, 2048));
  print_exact("register counts", results(register_counts, random_bits(384, 22), 384, 384, 0));
  const DeviceArray<uint32_t> tensor(random_bits(96 * 64 / 2, 23));
  for (const int swizzle : {0, 32, 64, 128}) {
    const uint32_t columns = swizzle ? static_cast<uint32_t>(swizzle) / 2 : 32, rows = 2048 / columns;
    const DeviceArray<uint32_t> out(std::vector<uint32_t>(2048, 0));
    const TmaMap map = make_map(tensor.data(), {96, 64}, {columns, rows}, swizzle);
    launch(stream(), bulk_copies<2>, 1, 32, 8200, map, Words{nullptr, out.data()});
    print_exact("bulk copy 2d " + std::to_string(swizzle), out.values());
    const DeviceArray<uint32_t> out3(std::vector<uint32_t>(2048, 0));
    const TmaMap map3 = make_map(tensor.data(), {96, 4, 16}, {columns, 2, rows / 2}, swizzle);
    launch(stream(), bulk_copies<3>, 1, 32, 8200, map3, Words{nullptr, out3.data()});
    print_exact("bulk copy 3d " + std::to_string(swizzle), out3.values());
  }
  run_columns<32>();
  run_columns<48>();
  run_columns<64>();
  run_columns<80>();
  run_columns<96>();
  run_columns<112>();
  run_columns<128>();
  run_columns<176>();
  run_columns<192>();
  run_columns<256>();
  print_close("wgmma random",
              results(wgmma<bf16_t, 64, false, true, false>, halves<bf16_t>(10240, 35, false), 4096, 128, 40960), 0,
              128 * 1.2e-7);
}

}  // namespace packattn::cuda::conformance
