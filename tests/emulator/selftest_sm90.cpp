// The emulator's own test, Hopper's part: a matrix product, and that it sees each kind of mistake.
#include <cmath>
#include <cstdio>
#include <random>

#include "gemm_sm90.cuh"

namespace packattn::cuda {
namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n%s", what, emu::report().text().c_str());
}

TmaMap map_of(const emu::Buffer<uint16_t>& matrix, uint64_t rows, uint64_t columns) {
  TmaMap map;
  map.base = reinterpret_cast<const char*>(matrix.p);
  map.rank = 2;
  map.swizzle = 128;
  map.size[0] = columns;
  map.size[1] = rows;
  map.stride[0] = 2;
  map.stride[1] = columns * 2;
  map.box[0] = map.box[1] = 64;
  return map;
}

template <class T, bool B_MN>
void test_gemm(int m, int n, int k) {
  const auto count = [](int rows, int columns) { return static_cast<size_t>(rows) * static_cast<size_t>(columns); };
  emu::Buffer<uint16_t> a(count(m, k)), b(count(n, k));
  emu::Buffer<float> c(count(m, n));
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < a.n; ++i) a[i] = ptx::narrow<T>(normal(random));
  for (size_t i = 0; i < b.n; ++i) b[i] = ptx::narrow<T>(normal(random));
  const auto rows = [](int x) { return static_cast<uint64_t>(x); };
  const TmaMap map_a = map_of(a, rows(m), rows(k)), map_b = map_of(b, rows(B_MN ? k : n), rows(B_MN ? n : k));
  const dim3 grid{static_cast<unsigned>((m + 63) / 64), static_cast<unsigned>((n + 63) / 64)};
  emu::launch(grid, dim3{GemmShape::kThreads}, GemmShape::kSharedBytes,
              [&] { gemm_sm90<T, B_MN>(map_a, map_b, c.p, m, n, k); });
  long wrong = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double want = 0, terms = 0;
      for (int l = 0; l < k; ++l) {
        const double x = ptx::widen<T>(a[count(i, k) + static_cast<size_t>(l)]);
        const double y =
            ptx::widen<T>(b[B_MN ? count(l, n) + static_cast<size_t>(j) : count(j, k) + static_cast<size_t>(l)]);
        want += x * y;
        terms += std::fabs(x * y);
      }
      wrong += !(std::fabs(c[count(i, n) + static_cast<size_t>(j)] - want) <= 1e-6 * terms);
    }
  }
  std::printf("gemm %s B_%s %d x %d x %d: %ld wrong, %llu reports\n", is_f16<T> ? "f16" : "bf16", B_MN ? "MN" : "K", m,
              n, k, wrong, static_cast<unsigned long long>(emu::report().total()));
  expect(wrong == 0 && emu::report().total() == 0, "the product is right and gives no report");
  emu::report().clear();
}

// Rows of `span` bytes: chunk c of 16 bytes in row r stands at chunk c ^ (number of the 128-byte line % chunks in a
// row).
void test_swizzle() {
  for (const uint32_t span : {32u, 64u, 128u}) {
    const uint32_t chunks = span / 16;
    bool right = true;
    for (uint32_t row = 0; row < 32; ++row) {
      for (uint32_t c = 0; c < chunks; ++c) {
        const uint32_t line = row * span / 128, want = row * span + (c ^ line % chunks) * 16 + 2;
        right = right && emu::swizzled(row * span + c * 16 + 2, static_cast<int>(span)) == want;
      }
    }
    expect(right, "swizzles");
  }
}

int thread() { return static_cast<int>(threadIdx.x); }

template <class Body>
void expect_report(emu::Kind kind, const char* what, int threads, Body body) {
  emu::launch(dim3{1}, dim3{static_cast<unsigned>(threads)}, 16384, body);
  expect(emu::report().count[kind] > 0, what);
  emu::report().clear();
}

void test_findings() {
  constexpr uint32_t kBarrier = 8192;
  const auto init = [](uint32_t count) {
    if (thread() == 0) {
      ptx::mbarrier_init(kBarrier, count);
      ptx::fence_mbarrier_init();
    }
    ptx::block_sync();
  };
  expect_report(emu::kDeadlock, "an mbarrier that too few arrive at", 32, [=] {
    init(2);
    if (thread() == 0) ptx::mbarrier_arrive(kBarrier);
    ptx::mbarrier_wait(kBarrier, 0);
  });
  expect_report(emu::kRace, "an mbarrier that is not waited for", 64, [=] {
    init(32);
    if (thread() < 32) {
      ptx::sts32(static_cast<uint32_t>(thread()) * 4, 1);
      ptx::mbarrier_arrive(kBarrier);
    } else {
      ptx::lds32(static_cast<uint32_t>(thread() - 32) * 4);
    }
  });
  expect_report(emu::kProtocol, "a wait on what is no mbarrier", 32, [] { ptx::mbarrier_wait(64, 0); });
  expect_report(emu::kProtocol, "one arrival too many", 32, [=] {
    init(1);
    ptx::mbarrier_arrive_expect(kBarrier, 16);
  });
  expect_report(emu::kLeftover, "a named barrier left half full", 64, [] {
    if (thread() < 32) ptx::named_arrive(1, 64);
  });
  expect_report(emu::kDeadlock, "a named barrier that nobody else comes to", 64, [] {
    if (thread() < 32) ptx::named_sync(1, 64);
  });
  expect_report(emu::kRace, "who arrives at a named barrier has not been waited for", 64, [] {
    const auto at = static_cast<uint32_t>(thread()) * 4;
    if (thread() < 32) {
      ptx::sts32(at, 1);
      ptx::named_arrive(1, 64);
      ptx::lds32(at + 128);
    } else {
      ptx::sts32(at, 1);
      ptx::named_sync(1, 64);
      ptx::lds32(at - 128);
    }
  });
  expect_report(emu::kProtocol, "more registers than the block has", 256, [] { ptx::registers_increase<256>(); });
  expect_report(emu::kProtocol, "a turn out of order", 256, [] {
    if (thread() >= 128) ptx::turn(0, 1, true);
    if (thread() >= 128) ptx::turn(0, 1, true);
  });
  const auto operands = [] {
    for (int i = thread(); i < 4096; i += 128) ptx::sts32(static_cast<uint32_t>(i) * 4, 0);
  };
  const uint64_t a = matrix_descriptor(0, 16, 1024, Swizzle::bytes128);
  const uint64_t b = matrix_descriptor(8192, 16, 1024, Swizzle::bytes128);
  expect_report(emu::kProxy, "stores that wgmma reads with no fence between", 128, [=] {
    operands();
    ptx::block_sync();
    float d[32] = {};
    ptx::wgmma_fence();
    ptx::wgmma_ss<bf16_t, false, false>(d, a, b, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
  });
  expect_report(emu::kProtocol, "an accumulator touched in flight", 128, [=] {
    operands();
    ptx::fence_proxy_async();
    ptx::block_sync();
    float d[32] = {};
    ptx::wgmma_fence();
    ptx::wgmma_ss<bf16_t, false, false>(d, a, b, false);
    ptx::wgmma_commit();
    d[3] += 1.f;
    ptx::wgmma_wait<0>(d);
  });
  expect_report(emu::kProtocol, "a wait that does not name its accumulator", 128, [=] {
    operands();
    ptx::fence_proxy_async();
    ptx::block_sync();
    float d[32] = {};
    ptx::wgmma_fence();
    ptx::wgmma_ss<bf16_t, false, false>(d, a, b, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  });
  expect_report(emu::kLeftover, "a product not waited for", 128, [=] {
    operands();
    ptx::fence_proxy_async();
    ptx::block_sync();
    static float d[128][32];
    ptx::wgmma_fence();
    ptx::wgmma_ss<bf16_t, false, false>(d[thread()], a, b, false);
    ptx::wgmma_commit();
  });
  expect_report(emu::kRace, "an operand overwritten while wgmma reads it", 128, [=] {
    operands();
    ptx::fence_proxy_async();
    ptx::block_sync();
    float d[32] = {};
    ptx::wgmma_fence();
    ptx::wgmma_ss<bf16_t, false, false>(d, a, b, false);
    ptx::wgmma_commit();
    ptx::sts32(static_cast<uint32_t>(thread()) * 4, 1);
    ptx::wgmma_wait<0>(d);
  });
}

}  // namespace
}  // namespace packattn::cuda

int main() {
  using namespace packattn::cuda;
  test_gemm<bf16_t, false>(64, 64, 64);
  test_gemm<bf16_t, false>(128, 128, 512);
  test_gemm<f16_t, false>(100, 72, 200);
  test_gemm<bf16_t, true>(64, 64, 64);
  test_gemm<f16_t, true>(100, 72, 456);
  test_swizzle();
  test_findings();
  std::printf("%s\n", failures ? "FAILED" : "passed");
  return failures != 0;
}
