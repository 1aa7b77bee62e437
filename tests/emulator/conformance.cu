// Runs every function of ptx.cuh and ptx_sm90.cuh on fixed inputs and prints one line each. On a GPU it says what the
// hardware does, with g++ what the emulator does; conformance.py compares the two.
//
// For a GPU of sm_80 or later (sm_90a for Hopper's own instructions), and for the emulator:
//
//   nvcc -std=c++20 -O2 -arch=sm_90a -o on_gpu tests/emulator/conformance.cu
//
//   g++ -std=c++20 -O2 -ffp-contract=off -Itests/emulator -x c++ -o emulated tests/emulator/conformance.cu
//
//   ./on_gpu > on_gpu.txt; ./emulated > emulated.txt; python tests/emulator/conformance.py on_gpu.txt emulated.txt
#include "conformance.h"
#include "conformance_sm90.cuh"

namespace packattn::cuda::conformance {
namespace {

PACKATTN_DEVICE uint32_t word(const Words& w, int i) { return ptx::load_global(w.in + i); }
PACKATTN_DEVICE void put(const Words& w, int i, uint32_t v) { ptx::store_global(w.out + i, v); }

// ---- threads
__global__ void shuffles(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t x = word(w, t);
  for (int mask = 0; mask < 32; ++mask) put(w, t * 112 + mask, ptx::shfl_xor(x, mask));
  for (int d = 0; d < 32; ++d) put(w, t * 112 + 32 + d, ptx::shfl_up(x, d));
  put(w, t * 112 + 64, ptx::shfl(x, static_cast<int>(word(w, 32 + t) % 32)));
  put(w, t * 112 + 65, ptx::fbits(ptx::shfl_xor(ptx::bitsf(x), 5)));
  const auto wide = static_cast<unsigned long long>(x) << 32 | word(w, 32 + t);
  const auto other = ptx::shfl_xor(wide, 9);
  put(w, t * 112 + 66, static_cast<uint32_t>(other));
  put(w, t * 112 + 67, static_cast<uint32_t>(other >> 32));
}
__global__ void votes(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) {
    const uint32_t x = word(w, t * 8 + i);
    const bool yes = i == 0 || (i > 1 && x % static_cast<uint32_t>(1 << i) == 0);  // all, none, fewer and fewer
    put(w, t * 40 + i, ptx::ballot(yes));
    put(w, t * 40 + 8 + i, ptx::any_lane(yes));
    put(w, t * 40 + 16 + i, ptx::all_lanes(yes));
    put(w, t * 40 + 24 + i, static_cast<uint32_t>(ptx::reduce_min(static_cast<int>(x))));
    put(w, t * 40 + 32 + i, static_cast<uint32_t>(ptx::reduce_max(static_cast<int>(x))));
  }
}
__global__ void indices(Words w) {
  int t = static_cast<int>(threadIdx.x);
  ptx::hold(t);
  put(w, t * 2, static_cast<uint32_t>(ptx::thread_index() + ptx::popc(word(w, t))));
  put(w, t * 2 + 1, static_cast<uint32_t>(ptx::block_index()) + blockDim.x * 1000 + gridDim.x);
}
// Two pairs of warps, each with a barrier of its own; then one warp that others let go on.
__global__ void named_barriers(Words w) {
  const int t = static_cast<int>(threadIdx.x), pair = t / 64;
  const uint32_t at = ptx::smem_base() + static_cast<uint32_t>(t) * 4;
  ptx::sts32(at, word(w, t));
  ptx::named_sync(1 + pair, 64);
  const uint32_t other = ptx::lds32(ptx::smem_base() + static_cast<uint32_t>(t ^ 32) * 4);
  if (t >= 32) {
    ptx::named_arrive(3, 128);
  } else {
    ptx::named_sync(3, 128);
  }
  put(w, t * 2, other);
  put(w, t * 2 + 1, t < 32 ? ptx::lds32(ptx::smem_base() + static_cast<uint32_t>(96 + t) * 4) : 0);
}

// ---- memory
__global__ void global_memory(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  ptx::store_global(reinterpret_cast<uint4*>(w.out) + t, ptx::load_global(reinterpret_cast<const uint4*>(w.in) + t));
  ptx::store_global(reinterpret_cast<uint2*>(w.out) + 64 + t,
                    ptx::load_global(reinterpret_cast<const uint2*>(w.in) + 64 + t));
  ptx::store_global(reinterpret_cast<uint16_t*>(w.out) + 384 + t,
                    ptx::load_global(reinterpret_cast<const uint16_t*>(w.in) + 384 + t));
  ptx::store_global(reinterpret_cast<uint8_t*>(w.out) + 832 + t,
                    ptx::load_global(reinterpret_cast<const uint8_t*>(w.in) + 832 + t));
}
__global__ void shared_memory(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base(), u = static_cast<uint32_t>(t);
  ptx::sts128(base + u * 16, ptx::load_global(reinterpret_cast<const uint4*>(w.in) + t));
  ptx::sts64(base + 512 + u * 8, ptx::load_global(reinterpret_cast<const float2*>(w.in) + 64 + t));
  ptx::sts32(base + 768 + u * 4, word(w, 192 + t));
  ptx::block_sync();
  const uint32_t v = u ^ 21;  // another thread's
  const uint4 a = ptx::lds128(base + v * 16);
  const float4 b = ptx::lds128f(base + v * 16);
  const float2 c = ptx::lds64(base + 512 + v * 8);
  const uint32_t all[11] = {a.x,
                            a.y,
                            a.z,
                            a.w,
                            ptx::fbits(b.x),
                            ptx::fbits(b.y),
                            ptx::fbits(b.z),
                            ptx::fbits(b.w),
                            ptx::fbits(c.x),
                            ptx::fbits(c.y),
                            ptx::lds32(base + 768 + v * 4)};
  for (int i = 0; i < 11; ++i) put(w, t * 11 + i, all[i]);
}
__global__ void async_copies(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base(), u = static_cast<uint32_t>(t);
  for (uint32_t i = 0; i < 7; ++i) ptx::sts32(base + (i * 32 + u) * 4, 0xFFFFFFFFu);
  ptx::block_sync();
  ptx::cp_async16(base + u * 16, w.in + t * 4, t % 3 != 0);
  ptx::cp_async_commit();
  ptx::cp_async8(base + 512 + u * 8, w.in + 128 + t * 2, t % 3 != 1);
  ptx::cp_async4(base + 768 + u * 4, w.in + 192 + t, t % 3 != 2);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  ptx::warp_sync();
  for (uint32_t i = 0; i < 4; ++i) put(w, static_cast<int>(i * 32 + u), ptx::lds32(base + (i * 32 + u) * 4));
  ptx::cp_async_wait<0>();
  ptx::warp_sync();
  for (uint32_t i = 4; i < 7; ++i) put(w, static_cast<int>(i * 32 + u), ptx::lds32(base + (i * 32 + u) * 4));
}

// ---- matrices
template <bool TRANSPOSED>
__global__ void ldmatrix(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::smem_base();
  for (int i = 0; i < 4; ++i) ptx::sts32(base + static_cast<uint32_t>(i * 32 + t) * 4, word(w, i * 32 + t));
  ptx::warp_sync();
  uint32_t r[4];
  const uint32_t row = base + static_cast<uint32_t>(t * 7 % 32) * 16;  // rows in no order
  if (TRANSPOSED) {
    ptx::ldmatrix_x4_trans(r, row);
  } else {
    ptx::ldmatrix_x4(r, row);
  }
  for (int i = 0; i < 4; ++i) put(w, t * 4 + i, r[i]);
}
template <class T>
__global__ void mma(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t a[4] = {word(w, t), word(w, 32 + t), word(w, 64 + t), word(w, 96 + t)};
  float d[4] = {1.f, 2.f, 3.f, 4.f};
  ptx::mma16816<T>(d, a, word(w, 128 + t), word(w, 160 + t));
  ptx::mma16816<T>(d, a, word(w, 192 + t), word(w, 224 + t));
  for (int i = 0; i < 4; ++i) put(w, t * 4 + i, ptx::fbits(d[i]));
}

// ---- numbers
enum Function { kEx2, kLg2, kRcp };
template <Function F>
__global__ void function(Words w) {
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < 256; i += 32) {
    const float x = ptx::bitsf(word(w, i));
    put(w, i, ptx::fbits(F == kEx2 ? ptx::ex2(x) : F == kLg2 ? ptx::lg2(x) : ptx::rcp(x)));
  }
}
template <class T>
__global__ void widen_all(Words w) {
  for (int i = static_cast<int>(threadIdx.x); i < 65536; i += 1024) {
    put(w, i, ptx::fbits(ptx::widen<T>(static_cast<uint16_t>(i))));
  }
}
template <class T>
__global__ void narrow_many(Words w) {
  for (int i = static_cast<int>(threadIdx.x); i < 65536; i += 1024) {
    const float x = ptx::bitsf(word(w, i)), y = ptx::bitsf(word(w, i ^ 1));
    const float2 both = ptx::unpack2<T>(ptx::pack2<T>(x, y));
    put(w, i * 4, ptx::narrow<T>(x));
    put(w, i * 4 + 1, ptx::pack2<T>(x, y));
    put(w, i * 4 + 2, ptx::fbits(both.x));
    put(w, i * 4 + 3, ptx::fbits(both.y) + static_cast<uint32_t>(ptx::fint(x)) + ptx::ibits(i));
  }
}

template <class T>
void run_type(const std::string& type) {
  print_exact("mma " + type, results(mma<T>, halves<T>(256, 1, true), 128, 32, 0));
  // Of 32 products of two numbers up to 2: the order of addition is the hardware's own.
  print_close("mma random " + type, results(mma<T>, halves<T>(256, 2, false), 128, 32, 0), 0, 128 * 1.2e-7);
  print_exact("widen " + type, results(widen_all<T>, {0}, 65536, 1024, 0));
  // Bits of every kind, NaN and numbers out of range among them; then such as lie near the type's own numbers.
  print_exact("narrow bits " + type, results(narrow_many<T>, random_bits(65536, 3), 4 * 65536, 1024, 0));
  print_exact("narrow " + type, results(narrow_many<T>, floats(65536, 4, -70000.f, 70000.f), 4 * 65536, 1024, 0));
  print_exact("narrow small " + type, results(narrow_many<T>, floats(65536, 5, -1e-4f, 1e-4f), 4 * 65536, 1024, 0));
}

std::vector<uint32_t> with(std::vector<uint32_t> values, const std::vector<uint32_t>& special) {
  std::copy(special.begin(), special.end(), values.begin());
  return values;
}

void run() {
  print_exact("shuffles", results(shuffles, random_bits(64, 10), 32 * 112, 32, 0));
  print_exact("votes", results(votes, random_bits(256, 11), 32 * 40, 32, 0));
  print_exact("indices", results(indices, random_bits(64, 9), 128, 64, 0));
  print_exact("named barriers", results(named_barriers, random_bits(128, 12), 256, 128, 512));
  print_exact("global memory", results(global_memory, random_bits(256, 13), 256, 32, 0));
  print_exact("shared memory", results(shared_memory, random_bits(256, 14), 32 * 11, 32, 1024));
  print_exact("async copies", results(async_copies, random_bits(256, 15), 224, 32, 1024));
  print_exact("ldmatrix", results(ldmatrix<false>, random_bits(128, 16), 128, 32, 512));
  print_exact("ldmatrix trans", results(ldmatrix<true>, random_bits(128, 17), 128, 32, 512));
  // Infinities, zeros, 1, numbers at whose results flushing begins.
  const std::vector<uint32_t> special = {0x7F800000u, 0xFF800000u, 0u,         0x80000000u,
                                         0x3F800000u, 0xC2FC0000u, 0xC2FE0000u};
  const std::vector<uint32_t> positive = {0x7F800000u, 0u, 0x3F800000u, 0x3F800001u, 0x3F7FFFFFu, 0x00800000u};
  print_close("ex2", results(function<kEx2>, with(floats(256, 18, -130.f, 20.f), special), 256, 32, 0), 2.5e-7, 0);
  print_close("lg2", results(function<kLg2>, with(floats(256, 19, 0.f, 300.f), positive), 256, 32, 0), 2.5e-7, 2.4e-7);
  print_close("rcp", results(function<kRcp>, with(floats(256, 20, 1e-3f, 300.f), positive), 256, 32, 0), 1.2e-7, 0);
  run_type<bf16_t>("bf16");
  run_type<f16_t>("f16");
}

}  // namespace
}  // namespace packattn::cuda::conformance

// Without an argument both parts; "sm80": what every GPU has; "sm90": what Hopper alone has.
int main(int count, char** arguments) {
  using namespace packattn::cuda::conformance;
  const std::string part = count > 1 ? arguments[1] : "";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what came before a kernel that hangs is not to be lost
  try {
    if (part.empty() || part == "sm80") run();
    if (part == "sm90" && !is_hopper()) throw std::runtime_error("sm90: this GPU does not run code for sm_90a");
    if ((part.empty() && is_hopper()) || part == "sm90") run_sm90();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
