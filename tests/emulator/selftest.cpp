// The emulator's own test: numbers, fragments, and that it sees each kind of mistake it promises to see.
#include <cstdio>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../../csrc/cuda/ptx.cuh"

namespace packattn::cuda {
namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n%s", what, emu::report().text().c_str());
}

void test_conversions() {
  int wrong = 0;
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto h = static_cast<uint16_t>(i);
    _Float16 f;
    std::memcpy(&f, &h, 2);
    const float want = static_cast<float>(f), got = emu::from_f16(h);
    wrong += want != want ? got == got : want != got;
  }
  for (uint32_t i = 0; i < 2000000; ++i) {
    const float f = emu::as_float(i * 2147u);
    if (f != f) continue;
    const auto h = static_cast<_Float16>(f);
    uint16_t want;
    std::memcpy(&want, &h, 2);
    wrong += want != emu::to_f16(f);
  }
  expect(wrong == 0, "float16 conversions are the compiler's");
}

// A 16 x 16 (row-major in shared memory) times B 16 x 8 (row-major too, through .trans).
void test_mma() {
  static float got[16][8];
  static uint16_t a[16][16], b[16][8];
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (auto& row : a) {
    for (auto& x : row) x = emu::to_bf16(normal(random));
  }
  for (auto& row : b) {
    for (auto& x : row) x = emu::to_bf16(normal(random));
  }
  emu::launch(dim3{1}, dim3{32}, 1024, [] {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < 16) {
      for (int j = 0; j < 8; ++j) ptx::sts32(lane * 32 + j * 4, a[lane][2 * j] | a[lane][2 * j + 1] << 16);
      for (int j = 0; j < 4; ++j) ptx::sts32(512 + lane * 16 + j * 4, b[lane][2 * j] | b[lane][2 * j + 1] << 16);
    }
    ptx::warp_sync();
    uint32_t fa[4], fb[4];
    ptx::ldmatrix_x4(fa, lane % 16 * 32 + lane / 16 * 16);
    ptx::ldmatrix_x4_trans(fb, 512 + lane % 16 * 16);
    float d[4] = {};
    ptx::mma16816<bf16_t>(d, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) got[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2] = d[i];
  });
  double worst = 0;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      double want = 0;
      for (int k = 0; k < 16; ++k) want += static_cast<double>(emu::from_bf16(a[i][k])) * emu::from_bf16(b[k][j]);
      worst = std::max(worst, std::fabs(want - got[i][j]));
    }
  }
  expect(worst < 1e-5 && emu::report().total() == 0, "ldmatrix and mma multiply matrices");
  emu::report().clear();
}

// Who may rely on what, step by step: kernels that go wrong do so in more than one way, and would hide one that is
// missed.
void test_order() {
  constexpr int kOther = 1, kFar = 32;  // another lane of thread 0's warp; a thread of the other warp
  constexpr uint32_t kLane = 1u << 1;
  for (const bool individual : {false, true}) {
    emu::Order order;
    order.reset(64);
    if (individual) order.individual();
    const emu::Time start = order.now(0);
    expect(order.knows(0, 0, start), "a thread knows its own work");
    expect(!order.knows(0, kOther, start) && !order.knows(0, kFar, start), "nobody knows of others at first");
    expect(!order.knows_lanes(0, 0, kLane, start) && !order.knows_lanes(0, 1, kLane, start), "nor as a warp");
    expect(order.knows_lanes(0, 0, 1u, start), "a thread's own reads do not stop it");
    order.warp_sync(0);
    expect(order.knows(0, kOther, start) && order.knows_lanes(0, 0, kLane, start), "__syncwarp orders a warp");
    expect(!order.knows(0, kFar, start) && !order.knows(kFar, 0, start), "__syncwarp orders no other warp");
    expect(!order.knows(kFar, kFar + 1, order.now(kFar)), "nor the lanes of one");
    expect(!order.knows(0, kOther, order.now(0)), "what comes after a barrier is not ordered by it");
    emu::Order::Knowledge given = order.nothing();
    const emu::Time released = order.now(0);
    order.release_warp(0, given);
    order.advance(0);
    order.acquire_warp(1, given);
    expect(order.knows(kFar, kOther, released), "who waits for an arrival knows what came before it");
    expect(!order.knows(kFar, kOther, order.now(0)), "and not what came after");
    expect(!order.knows(0, kFar, start), "who arrives learns nothing");
    const emu::Time before = order.now(0);
    order.block_sync();
    expect(order.knows(kFar, 0, before) && order.knows(0, kFar, start), "__syncthreads orders everybody");
    expect(!order.knows(kFar, 0, order.now(0)), "up to then");
  }
  emu::Order order;
  order.reset(64);
  order.individual();
  const emu::Time start = order.now(0);
  emu::Order::Knowledge given = order.nothing();
  order.release(0, given);
  order.acquire(kFar, given);
  expect(order.knows(kFar, 0, start), "a single thread's arrival");
  expect(!order.knows(kFar, kOther, start) && !order.knows(kFar + 1, 0, start), "is its own, and who waits is one too");
}

template <class Body>
void expect_report(emu::Kind kind, const char* what, int threads, Body body) {
  emu::launch(dim3{2}, dim3{static_cast<unsigned>(threads)}, 1024, body);
  expect(emu::report().count[kind] > 0, what);
  emu::report().clear();
}

void test_findings() {
  static emu::Buffer<uint32_t> buffer(64);
  using ptx::sts32, ptx::lds32;
  const auto tid = [] { return threadIdx.x; };
  expect_report(emu::kRace, "read after write without a barrier", 64, [=] {
    sts32(tid() * 4, 1);
    lds32((tid() ^ 32) * 4);
  });
  expect_report(emu::kRace, "write after a read by another lane of the warp", 32, [=] {
    sts32(tid() * 4, 1);
    ptx::warp_sync();
    lds32((tid() ^ 1) * 4);
    sts32(tid() * 4, 2);
  });
  expect_report(emu::kRace, "__syncwarp does not order warps", 64, [=] {
    sts32(tid() * 4, 1);
    ptx::warp_sync();
    lds32((tid() ^ 32) * 4);
  });
  expect_report(emu::kUninitialised, "read of what nobody wrote", 32, [=] { lds32(tid() * 4); });
  expect_report(emu::kOutOfBounds, "shared memory past its end", 32, [=] { sts32(1000 + tid() * 4, 1); });
  expect_report(emu::kMisaligned, "shared memory at an odd address", 32, [=] { sts32(tid() * 4 + 2, 1); });
  expect_report(emu::kOutOfBounds, "global memory past its end", 64, [=] { ptx::load_global(buffer.p + 1 + tid()); });
  expect_report(emu::kOutOfBounds, "cp.async from past the end", 32, [=] {
    ptx::cp_async16(tid() * 16, buffer.p + tid() * 4, true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  });
  expect_report(emu::kAsync, "cp.async not waited for", 32, [=] {
    ptx::cp_async4(tid() * 4, buffer.p + tid(), true);
    ptx::cp_async_commit();
    lds32(tid() * 4);
    ptx::cp_async_wait<0>();
  });
  expect_report(emu::kLeftover, "cp.async left at the end", 32,
                [=] { ptx::cp_async4(tid() * 4, buffer.p + tid(), true); });
  expect_report(emu::kDeadlock, "a barrier that half the block skips", 64, [=] {
    if (tid() < 32) ptx::block_sync();
  });
  expect_report(emu::kDivergence, "lanes at different shuffles", 32, [=] {
    if (tid() < 16) {
      ptx::shfl_xor(1.f, 1);
    } else {
      ptx::shfl_xor(2.f, 1);
    }
  });
  expect_report(emu::kDivergence, "threads at different barriers", 64, [=] {
    if (tid() < 32) {
      ptx::block_sync();
    } else {
      ptx::block_sync();
    }
  });
  expect_report(emu::kMisaligned, "global memory at an odd address", 32,
                [=] { ptx::load_global(reinterpret_cast<const uint2*>(buffer.p + 1 + 2 * (tid() % 16))); });
  expect_report(emu::kGlobalRace, "two blocks write one address", 32, [=] { ptx::store_global(buffer.p + tid(), 1u); });
  expect_report(emu::kGlobalRace, "two blocks write one number of two bytes", 32,
                [=] { ptx::store_global(reinterpret_cast<uint16_t*>(buffer.p) + 2 * tid(), uint16_t{1}); });
  expect_report(emu::kGlobalRace, "one block reads what another writes", 32, [=] {
    if (blockIdx.x == 0) ptx::store_global(buffer.p + tid(), 1u);
    if (blockIdx.x == 1) ptx::load_global(buffer.p + tid());
  });
  expect_report(emu::kGlobalRace, "one block copies what another writes", 32, [=] {
    if (blockIdx.x == 0) ptx::store_global(buffer.p + tid(), 1u);
    if (blockIdx.x == 1) ptx::cp_async4(tid() * 4, buffer.p + tid(), true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  });
  expect_report(emu::kGlobalRace, "a thread reads what another one of its block wrote, with no barrier", 64, [=] {
    if (blockIdx.x == 1) return;
    ptx::store_global(buffer.p + tid(), 1u);
    ptx::load_global(buffer.p + (tid() ^ 32));
  });
  emu::launch(dim3{1}, dim3{64}, 1024, [=] {
    sts32(tid() * 4, tid());
    ptx::block_sync();
    lds32((tid() ^ 32) * 4);
    ptx::block_sync();
    sts32(tid() * 4, 0);
    ptx::warp_sync();
    lds32((tid() ^ 1) * 4);
    ptx::cp_async4(256 + tid() * 4, buffer.p + tid(), true);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    lds32(256 + tid() * 4);
  });
  expect(emu::report().total() == 0, "a correct kernel gives no report");
  emu::report().clear();
  emu::launch(dim3{2}, dim3{32}, 0, [=] {
    auto* halves = reinterpret_cast<uint16_t*>(buffer.p);
    ptx::store_global(halves + 2 * tid() + blockIdx.x, uint16_t{1});
    ptx::block_sync();
    ptx::load_global(halves + 2 * (tid() ^ 1) + blockIdx.x);
  });
  expect(emu::report().total() == 0,
         "blocks may write neighbouring numbers of two bytes, threads read after a barrier");
  emu::report().clear();
}

// What a report says, and when there are too many.
void test_reports() {
  const int line = __LINE__ + 1;
  emu::launch(dim3{3}, dim3{32}, 1024, [] { ptx::lds32(threadIdx.x * 4); });
  const std::string text = emu::take_reports();
  expect(text.find("uninitialised x96: selftest.cpp:" + std::to_string(line)) != std::string::npos,
         "a report says what, how often and where");
  expect(emu::take_reports().empty(), "taken reports are gone");

  const uint64_t cap = std::exchange(emu::config().report_cap, 5);
  int finished = 0;
  emu::launch(dim3{3}, dim3{64}, 1024, [&finished] {
    ptx::lds32(threadIdx.x * 4);
    ++finished;
  });
  expect(emu::report().total() == 5 && finished == 4, "a launch is abandoned at the cap");
  emu::report().clear();
  emu::config().report_cap = cap;
  emu::launch(dim3{1}, dim3{64}, 1024, [&finished] { ++finished; });
  expect(emu::report().total() == 0 && finished == 68, "the launch after an abandoned one is whole");
}

void test_refusals() {
  const auto refused = [](unsigned threads, size_t shared_bytes) {
    try {
      emu::launch(dim3{1}, dim3{threads}, shared_bytes, [] {});
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  expect(refused(0, 0) && refused(33, 0) && refused(1056, 0), "threads of a block come in whole warps, up to 1024");
  expect(refused(32, emu::config().shared_memory + 1), "no more shared memory than there is");
  expect(!refused(1024, emu::config().shared_memory), "the largest block");
}

// Schedules differ by policy and seed, and are the same again for the same.
void test_schedules() {
  const auto schedule = [](int policy, uint64_t seed) {
    const emu::Config before = emu::config();
    emu::config().policy = policy;
    emu::config().seed = seed;
    std::vector<unsigned> order;
    emu::launch(dim3{4}, dim3{64}, 0, [&order] {
      order.push_back(blockIdx.x * 64 + threadIdx.x);
      ptx::block_sync();
      order.push_back(threadIdx.x);
    });
    emu::config() = before;
    return order;
  };
  expect(schedule(0, 1) != schedule(1, 1) && schedule(0, 1) != schedule(2, 1), "policies differ");
  expect(schedule(2, 1) != schedule(2, 2) && schedule(2, 1) == schedule(2, 1), "seeds make schedules, always the same");
}

}  // namespace
}  // namespace packattn::cuda

int main() {
  using namespace packattn::cuda;
  test_conversions();
  test_mma();
  test_order();
  test_findings();
  test_reports();
  test_refusals();
  test_schedules();
  std::printf("%s\n", failures ? "FAILED" : "passed");
  return failures != 0;
}
