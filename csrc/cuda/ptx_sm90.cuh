// Hopper's instructions (sm_90a), one named function each, as in ptx.cuh.
//
// wgmma. A warpgroup (four warps, the first a multiple of four) multiplies A, 64 x 16, by B, 16 x N. Warp w of the
// group holds rows 16w..16w+15 of the accumulators, in tiles of 8 columns that are C fragments of ptx.cuh: d[4j + i] is
// d[i] of columns 8j..8j+7. A from registers is the fragment A of ptx.cuh; A and B from shared memory come by
// descriptor:
//
//   K-major:  rows of the span of the swizzle along k, eight rows make a group; `stride` bytes from group to group of
//             eight rows (of A) or columns (of B). A step of 16 in k is 32 bytes further, inside the span.
//   MN-major: rows of the span along m or n, eight of them (eight k) a group; `stride` bytes from group to group
//             along k, `leading` bytes from one span to the next along m or n.
//
// With swizzle, chunk c of 16 bytes in row r of a group lies at chunk c ^ (r % 8) (128-byte span), and groups start at
// multiples of 1024 bytes. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Operation".
#pragma once
#include "ptx.cuh"

namespace packattn::cuda {

enum class Swizzle : uint32_t { none = 0, bytes128 = 1, bytes64 = 2, bytes32 = 3 };

// Shared memory matrix descriptor: address and offsets in bytes, multiples of 16 below 2^18.
PACKATTN_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>(address >> 4 & 0x3FFF) | static_cast<uint64_t>(leading >> 4 & 0x3FFF) << 16 |
         static_cast<uint64_t>(stride >> 4 & 0x3FFF) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// The descriptor of what lies `bytes` further on. Addresses stay below 2^18, so no carry leaves the address's field;
// that the other half of the number is left alone saves instructions.
PACKATTN_DEVICE uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xFFFFFFFF00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

}  // namespace packattn::cuda

#if !defined(__CUDACC__)
#include "ptx_sm90_emulated.h"
#else
#include <cuda.h>

namespace packattn::cuda {

using TmaMap = CUtensorMap;  // a __grid_constant__ parameter of the kernel

namespace ptx {

// ---- mbarriers: 8 bytes of shared memory, 8-aligned -----------------------------------------------------------------

// A phase is complete when `count` arrivals came and every announced byte landed; the next begins at once.
PACKATTN_DEVICE void mbarrier_init(uint32_t address, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}
// After the inits, before any bulk copy: makes them visible to the asynchronous proxy.
PACKATTN_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// After ordinary stores to shared memory that wgmma or a bulk copy is to read; by the threads that stored.
PACKATTN_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PACKATTN_DEVICE void mbarrier_arrive(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
// Arrives, and announces bytes that bulk copies on this barrier will land.
PACKATTN_DEVICE void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}
// Until the phase of this parity is complete: phase p (from 0) has parity p % 2. On a fresh barrier, 1 does not wait.
PACKATTN_DEVICE void mbarrier_wait(uint32_t address, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(address),
      "r"(parity)
      : "memory");
}

// ---- turns, registers -----------------------------------------------------------------------------------------------

// Says that warpgroups take turns in the order of their numbers; the emulator checks it, a GPU does nothing.
PACKATTN_DEVICE void turn(int, int, bool) {}

// Registers per thread, given back to or taken from the block's; by all warps of a warpgroup. N: 24 to 256, N % 8 == 0.
template <int N>
PACKATTN_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
PACKATTN_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- bulk tensor copies ---------------------------------------------------------------------------------------------

// The map's box at coordinates (c0 the contiguous dimension), to shared memory, by one thread; what lies outside the
// tensor becomes zero. The whole box counts as bytes on the barrier. destination: 128-aligned, 1024 with 128-byte
// swizzle.
PACKATTN_DEVICE void tma_load_2d(uint32_t destination, const TmaMap* map, uint32_t barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
PACKATTN_DEVICE void tma_load_3d(uint32_t destination, const TmaMap* map, uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Before the first product that touches accumulators (or A) which ordinary instructions wrote.
PACKATTN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PACKATTN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the N newest groups are complete. Names every accumulator that it completes: the compiler may otherwise
// move ordinary reads of those registers above the wait.
template <int N, int... K>
PACKATTN_DEVICE void wgmma_wait(float (&... d)[K]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  const auto keep = [](auto& accumulators) {
    for (float& x : accumulators) asm volatile("" : "+f"(x)::"memory");
  };
  (keep(d), ...);
}

// d = A B, or d += A B if accumulate; N is twice the length of d. wgmma_ss: A and B by descriptor; wgmma_rs: A from
// registers, which must not change before the wait. A_MN, B_MN: the operand is MN-major in shared memory.
//   wgmma_ss<T, A_MN, B_MN>(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate)
//   wgmma_rs<T, B_MN>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate)
}  // namespace ptx
}  // namespace packattn::cuda

#include "ptx_sm90_wgmma.cuh"

namespace packattn::cuda::ptx {

// ptxas moves plain arithmetic below a later wgmma_wait. This keeps what x depends on above it: a sleep that never
// comes, x being never negative. (A trap does the same and costs registers: with it ptxas 13.0 spills, and serialises
// wgmma.)
PACKATTN_DEVICE void finish_before_here(float x) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p nanosleep.u32 1;\n}" ::"f"(x) : "memory");
}
// The same for many numbers, given as the exclusive or of their bits. One value in 2^32 makes it sleep a nanosecond.
PACKATTN_DEVICE void finish_before_here(uint32_t bits) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x5bd1e995;\n@p nanosleep.u32 1;\n}" ::"r"(bits) : "memory");
}

}  // namespace packattn::cuda::ptx
#endif
