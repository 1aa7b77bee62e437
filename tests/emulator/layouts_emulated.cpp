// Fragment, swizzle and descriptor layouts as the emulator has them, found by running the instructions on operands that
// tell where each number went. layouts_cute.cpp prints the same lines from CuTe; test_emulator_layouts.py compares
// them.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/cuda/ptx_sm90.cuh"

namespace packattn::cuda {
namespace {

int thread() { return static_cast<int>(threadIdx.x); }

template <class T>
uint32_t one_in_half(bool set, int half) {
  return set ? static_cast<uint32_t>(ptx::narrow<T>(1.f)) << 16 * half : 0;
}

// ---- mma.sync and ldmatrix
template <class T>
void print_mma(const char* name) {
  static float d[32][4];
  for (int i = 0; i < 256; ++i) {
    for (int j = 0; j < 128; ++j) {
      emu::launch(dim3{1}, dim3{32}, 16, [i, j] {
        const int lane = thread();
        uint32_t a[4], b[2];
        for (int r = 0; r < 4; ++r) a[r] = one_in_half<T>(lane == i / 8 && r == i % 8 / 2, i % 2);
        for (int r = 0; r < 2; ++r) b[r] = one_in_half<T>(lane == j / 4 && r == j % 4 / 2, j % 2);
        for (float& x : d[lane]) x = 0.f;
        ptx::mma16816<T>(d[lane], a, b[0], b[1]);
      });
      for (int c = 0; c < 128; ++c) {
        if (d[c / 4][c % 4] != 0.f) std::printf("%s a%d b%d d%d\n", name, i, j, c);
      }
    }
  }
}

void print_ldmatrix(const char* name, bool transposed) {
  static uint32_t got[32][4];
  emu::launch(dim3{1}, dim3{32}, 512, [transposed] {
    const int lane = thread();
    for (int w = 0; w < 4; ++w) {
      const auto first = static_cast<uint32_t>(lane * 8 + 2 * w);
      ptx::sts32(static_cast<uint32_t>(lane * 16 + 4 * w), first | (first + 1) << 16);
    }
    ptx::warp_sync();
    if (transposed) {
      ptx::ldmatrix_x4_trans(got[lane], static_cast<uint32_t>(lane * 16));
    } else {
      ptx::ldmatrix_x4(got[lane], static_cast<uint32_t>(lane * 16));
    }
  });
  for (int lane = 0; lane < 32; ++lane) {
    for (int half = 0; half < 8; ++half) {
      const uint32_t s = got[lane][half / 2] >> 16 * (half % 2) & 0xFFFF;
      std::printf("%s lane %d register %d half %d: row %u element %u\n", name, lane, half / 2, half % 2, s / 8, s % 8);
    }
  }
}

// ---- swizzles
void print_swizzle(int span) {
  for (uint32_t address = 0; address < 4096; address += 4) {
    std::printf("swizzle %d: %u -> %u\n", span, address, emu::swizzled(address, span));
  }
}

void print_bulk_copy(int span) {
  const int columns = span / 2;
  emu::Buffer<uint16_t> from(static_cast<size_t>(8 * columns));
  for (size_t i = 0; i < from.n; ++i) from[i] = static_cast<uint16_t>(i);
  TmaMap map;
  map.base = reinterpret_cast<const char*>(from.p);
  map.rank = 2;
  map.swizzle = span;
  map.size[0] = map.box[0] = static_cast<uint32_t>(columns);
  map.size[1] = map.box[1] = 8;
  map.stride[0] = 2;
  map.stride[1] = static_cast<uint64_t>(span);
  std::vector<int> byte_of(from.n);
  emu::launch(dim3{1}, dim3{32}, 2048, [&] {
    constexpr uint32_t kBarrier = 1024;
    if (thread() == 0) {
      ptx::mbarrier_init(kBarrier, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect(kBarrier, static_cast<uint32_t>(from.bytes()));
      ptx::tma_load_2d(0, &map, kBarrier, 0, 0);
      ptx::mbarrier_wait(kBarrier, 0);
      for (uint32_t at = 0; at < from.bytes(); at += 4) {
        const uint32_t pair = ptx::lds32(at);
        byte_of[pair & 0xFFFF] = static_cast<int>(at);
        byte_of[pair >> 16] = static_cast<int>(at + 2);
      }
    }
  });
  for (int i = 0; i < 8 * columns; ++i) {
    std::printf("bulk copy swizzle %d row %d column %d: byte %d\n", span, i / columns, i % columns,
                byte_of[static_cast<size_t>(i)]);
  }
}

// ---- wgmma
struct Words {  // of shared memory, 16-bit numbers
  std::vector<uint32_t> words;
  explicit Words(size_t bytes) : words(bytes / 4) {}
  void set(size_t byte, float value) {
    uint16_t h = ptx::narrow<f16_t>(value);
    std::memcpy(reinterpret_cast<char*>(words.data()) + byte, &h, 2);
  }
};
// What a thread of the warpgroup brings in registers, and what it gets.
struct Registers {
  std::vector<float> a = std::vector<float>(128 * 8, 0.f);  // [thread, half]
  std::vector<float> d;                                     // [thread, N / 2]
};
constexpr uint32_t kFixed = 32768;  // where the operand lies that is not looked at

// d = A B with A from registers.
template <int N, bool B_MN>
void multiply(Registers& r, const Words& shared, uint64_t b) {
  r.d.assign(128 * (N / 2), 0.f);
  emu::launch(dim3{1}, dim3{128}, shared.words.size() * 4, [&] {
    const int t = thread();
    for (size_t w = static_cast<size_t>(t); w < shared.words.size(); w += 128) {
      ptx::sts32(static_cast<uint32_t>(w * 4), shared.words[w]);
    }
    ptx::fence_proxy_async();
    ptx::block_sync();
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      const float* halves = &r.a[static_cast<size_t>(t * 8 + 2 * i)];
      a[i] = ptx::pack2<f16_t>(halves[0], halves[1]);
    }
    float d[N / 2];
    for (float& x : d) x = 0.f;
    ptx::wgmma_fence();
    ptx::wgmma_rs<f16_t, B_MN>(d, a, b, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    std::memcpy(&r.d[static_cast<size_t>(t * (N / 2))], d, sizeof d);
  });
}
// d = A B with A from shared memory, N = 64.
template <bool A_MN>
void multiply_shared(Registers& r, const Words& shared, uint64_t a, uint64_t b) {
  r.d.assign(128 * 32, 0.f);
  emu::launch(dim3{1}, dim3{128}, shared.words.size() * 4, [&] {
    const int t = thread();
    for (size_t w = static_cast<size_t>(t); w < shared.words.size(); w += 128) {
      ptx::sts32(static_cast<uint32_t>(w * 4), shared.words[w]);
    }
    ptx::fence_proxy_async();
    ptx::block_sync();
    float d[32];
    for (float& x : d) x = 0.f;
    ptx::wgmma_fence();
    ptx::wgmma_ss<f16_t, A_MN, false>(d, a, b, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    std::memcpy(&r.d[static_cast<size_t>(t * 32)], d, sizeof d);
  });
}

// As ptx_sm90.cuh says: d of (row, column), a of (row, k).
float element_of_d(const Registers& r, int n, int row, int column) {
  const int t = row / 16 * 32 + row % 8 * 4 + column % 8 / 2, i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
  return r.d[static_cast<size_t>(t * (n / 2) + i)];
}
void set_a(Registers& r, int row, int k, float value) {
  const int t = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, half = 2 * (row % 16 / 8 + k / 8 * 2) + k % 2;
  r.a[static_cast<size_t>(t * 8 + half)] = value;
}
// A K-major operand without swizzle at kFixed, n columns: where (n, k) lies, and its descriptor.
size_t plain_byte(int n, int column, int k) {
  return kFixed + static_cast<size_t>(column / 8 * 128 + k / 8 * (n * 16) + column % 8 * 16 + k % 8 * 2);
}
uint64_t plain_descriptor(int n) {
  return matrix_descriptor(kFixed, static_cast<uint32_t>(n) * 16, 128, Swizzle::none);
}

// Where the element (mn, k) of each block is read from: every 16-bit number of the region tells its own place, in two
// runs, since float16 counts to 2048 only. Multiplied by an identity, the operand itself comes out.
template <int MN, bool IS_MN, bool IS_A = false>
void print_operand(const char* name, int leading, int stride, Swizzle swizzle, int blocks, uint32_t block_bytes) {
  constexpr size_t kRegion = 32768, kBytes = kRegion + 4096;
  const uint64_t descriptor =
      matrix_descriptor(0, static_cast<uint32_t>(leading), static_cast<uint32_t>(stride), swizzle);
  for (int block = 0; block < blocks; ++block) {
    std::printf("%s block %d leading %d stride %d swizzle %d\n", name, block, leading, stride,
                static_cast<int>(swizzle));
    std::vector<int> place(MN * 16, 0);
    for (int digit = 0; digit < 2; ++digit) {
      Words shared(kBytes);
      for (size_t e = 0; e < kRegion / 2; ++e) shared.set(e * 2, static_cast<float>(digit ? e / 1024 : e % 1024));
      const uint64_t operand = advance(descriptor, static_cast<uint32_t>(block) * block_bytes);
      Registers r;
      for (int k = 0; k < 16; ++k) {
        set_a(r, k, k, 1.f);
        if (IS_A) shared.set(plain_byte(64, k, k), 1.f);
      }
      if constexpr (IS_A) {
        multiply_shared<IS_MN>(r, shared, operand, plain_descriptor(64));
      } else {
        multiply<MN, IS_MN>(r, shared, operand);
      }
      for (int mn = 0; mn < MN; ++mn) {
        for (int k = 0; k < 16; ++k) {
          const float found = IS_A ? element_of_d(r, 64, mn, k) : element_of_d(r, MN, k, mn);
          place[static_cast<size_t>(mn * 16 + k)] += static_cast<int>(found) * (digit ? 1024 : 1);
        }
      }
    }
    for (int i = 0; i < MN * 16; ++i) {
      std::printf("%s block %d (%d, %d): byte %d\n", name, block, i / 16, i % 16, place[static_cast<size_t>(i)] * 2);
    }
  }
}

template <int N>
void print_wgmma_accumulator() {
  Registers rows, columns;
  Words ones(kFixed + N * 32), numbers(kFixed + N * 32);
  for (int n = 0; n < N; ++n) {
    ones.set(plain_byte(N, n, 0), 1.f);
    numbers.set(plain_byte(N, n, 0), static_cast<float>(n));
  }
  for (int m = 0; m < 64; ++m) {
    set_a(rows, m, 0, static_cast<float>(m));
    set_a(columns, m, 0, 1.f);
  }
  multiply<N, false>(rows, ones, plain_descriptor(N));
  multiply<N, false>(columns, numbers, plain_descriptor(N));
  for (int i = 0; i < 128 * (N / 2); ++i) {
    std::printf("wgmma %d thread %d d[%d]: (%d, %d)\n", N, i / (N / 2), i % (N / 2),
                static_cast<int>(rows.d[static_cast<size_t>(i)]), static_cast<int>(columns.d[static_cast<size_t>(i)]));
  }
}

void print_wgmma_a() {
  Registers r;
  Words shared(kFixed + 64 * 32);
  for (int k = 0; k < 16; ++k) shared.set(plain_byte(64, k, k), 1.f);
  for (size_t i = 0; i < r.a.size(); ++i) r.a[i] = static_cast<float>(i);
  multiply<64, false>(r, shared, plain_descriptor(64));
  std::vector<int> place(r.a.size());
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < 16; ++k) place[static_cast<size_t>(element_of_d(r, 64, m, k))] = m * 16 + k;
  }
  for (size_t i = 0; i < place.size(); ++i) {
    std::printf("wgmma A thread %zu half %zu: (%d, %d)\n", i / 8, i % 8, place[i] / 16, place[i] % 16);
  }
}

}  // namespace
}  // namespace packattn::cuda

int main() {
  using namespace packattn::cuda;
  print_mma<bf16_t>("mma bf16");
  print_mma<f16_t>("mma f16");
  print_ldmatrix("ldmatrix", false);
  print_ldmatrix("ldmatrix trans", true);
  for (int span : {128, 64, 32}) print_swizzle(span);
  for (int span : {128, 64, 32}) print_bulk_copy(span);

  print_operand<64, false>("K 128 64", 16, 1024, Swizzle::bytes128, 4, 32);
  print_operand<176, false>("K 128 176", 16, 1024, Swizzle::bytes128, 4, 32);
  print_operand<256, false>("K 128 256", 16, 1024, Swizzle::bytes128, 4, 32);
  print_operand<128, false>("K 64 128", 16, 512, Swizzle::bytes64, 2, 32);
  print_operand<64, false>("K 32 64", 16, 256, Swizzle::bytes32, 1, 32);
  print_operand<64, false>("K 0 64", 1024, 128, Swizzle::none, 1, 0);
  print_operand<64, true>("MN 128 64", 0, 1024, Swizzle::bytes128, 4, 2048);
  print_operand<256, true>("MN 128 256", 8192, 1024, Swizzle::bytes128, 4, 2048);
  print_operand<64, true>("MN 64 64", 2048, 512, Swizzle::bytes64, 2, 1024);
  print_operand<64, false, true>("A K 128 64", 16, 1024, Swizzle::bytes128, 4, 32);
  print_operand<64, true, true>("A MN 128 64", 0, 1024, Swizzle::bytes128, 4, 2048);

  print_wgmma_accumulator<32>();
  print_wgmma_accumulator<48>();
  print_wgmma_accumulator<64>();
  print_wgmma_accumulator<80>();
  print_wgmma_accumulator<96>();
  print_wgmma_accumulator<112>();
  print_wgmma_accumulator<128>();
  print_wgmma_accumulator<176>();
  print_wgmma_accumulator<192>();
  print_wgmma_accumulator<256>();
  print_wgmma_a();
  const std::string reports = packattn::emu::take_reports();
  if (!reports.empty()) std::printf("%s", reports.c_str());
  return !reports.empty();
}
