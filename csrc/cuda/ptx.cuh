// Every machine instruction the kernels use, one named function each, with the layout of its fragments.
//
// Under nvcc a function is its PTX instruction. Any other compiler gets the same functions from "ptx_emulated.h"
// (tests/emulator), which executes them on the CPU and checks what a GPU would leave unsaid. For that to see
// everything, kernels hold no inline assembly, no __shared__ variables and no pointers into shared memory: shared
// memory is addressed by 32-bit byte offsets and touched through these functions alone, and global memory is read and
// written through load_global and store_global.
//
// Fragments. A warp holds a matrix spread over its 32 lanes. With g = lane / 4 and t = lane % 4:
//
//   A, 16 x 16, 16-bit: a[0] = (g, 2t) (g, 2t+1)        a[1] = (g+8, 2t) (g+8, 2t+1)
//                       a[2] = (g, 2t+8) (g, 2t+9)      a[3] = (g+8, 2t+8) (g+8, 2t+9)
//   B, 16 x 8, 16-bit:  b0 = (2t, g) (2t+1, g)          b1 = (2t+8, g) (2t+9, g)          as (k, n)
//   C, 16 x 8, float:   d[0] = (g, 2t)   d[1] = (g, 2t+1)   d[2] = (g+8, 2t)   d[3] = (g+8, 2t+1)
//
// Of two 16-bit numbers in a register the first named is in the low half. An accumulator C is laid out like the upper
// or lower half of A's columns, which is how a product becomes the next product's operand without leaving the
// registers: columns 16j..16j+15 of a C are, as A, {pack2(c[2j][0], c[2j][1]), pack2(c[2j][2], c[2j][3]),
// pack2(c[2j+1][0], c[2j+1][1]), pack2(c[2j+1][2], c[2j+1][3])}. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once
#include <cstdint>
#include <type_traits>

namespace packattn::cuda {

// 16-bit element types. The numbers themselves are uint16_t, so that no kernel needs a vendor's headers.
struct bf16_t {};
struct f16_t {};

template <class T>
inline constexpr bool is_f16 = std::is_same_v<T, f16_t>;

}  // namespace packattn::cuda

#if !defined(__CUDACC__)
#include "ptx_emulated.h"
#else

#define PACKATTN_DEVICE __device__ __forceinline__

namespace packattn::cuda::ptx {

// ---- threads -------------------------------------------------------------------------------------------------------

// Leaves a number or an address as it is, but whoever optimises cannot see that: it is kept in a register from here on,
// not computed again from what it came from.
template <class T>
PACKATTN_DEVICE void hold(T& value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

// threadIdx.x and blockIdx.x, read here and now: what is computed from them is not moved out of a loop, where it would
// hold registers.
PACKATTN_DEVICE int thread_index() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return static_cast<int>(r);
}
PACKATTN_DEVICE int block_index() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return static_cast<int>(r);
}

// Waits for all threads of the block; what they wrote to shared and global memory before it, all see after it.
PACKATTN_DEVICE void block_sync() { __syncthreads(); }

// The same among the 32 lanes of a warp. Shuffles, votes, ldmatrix and mma give no such promise about memory.
PACKATTN_DEVICE void warp_sync() { __syncwarp(); }

// The same among the warps that come to barrier `id`, 1 to 15, of which it lets `threads` threads meet (whole warps).
// Those that arrive count and do not wait.
PACKATTN_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
PACKATTN_DEVICE void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The value of lane `lane ^ mask`, of lane `source`, of the lane `delta` below (lanes under delta keep their own).
// T: a 4- or 8-byte arithmetic type. All 32 lanes take part.
template <class T>
PACKATTN_DEVICE T shfl_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}
template <class T>
PACKATTN_DEVICE T shfl(T value, int source) {
  return __shfl_sync(0xFFFFFFFFu, value, source);
}
template <class T>
PACKATTN_DEVICE T shfl_up(T value, int delta) {
  return __shfl_up_sync(0xFFFFFFFFu, value, delta);
}

// Whether any, whether every lane says so; ballot: bit i is what lane i says.
PACKATTN_DEVICE bool any_lane(bool b) { return __any_sync(0xFFFFFFFFu, b); }
PACKATTN_DEVICE bool all_lanes(bool b) { return __all_sync(0xFFFFFFFFu, b); }
PACKATTN_DEVICE uint32_t ballot(bool b) { return __ballot_sync(0xFFFFFFFFu, b); }

// Smallest and largest of the 32 lanes' numbers, in a register that all lanes share. sm_80 and later.
PACKATTN_DEVICE int reduce_min(int value) {
  int r;
  asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(value));
  return r;
}
PACKATTN_DEVICE int reduce_max(int value) {
  int r;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(value));
  return r;
}

// ---- global memory -------------------------------------------------------------------------------------------------

// T: trivially copyable, 1, 2, 4, 8 or 16 bytes; the address is a multiple of its size.
template <class T>
PACKATTN_DEVICE T load_global(const T* p) {
  return *p;
}
template <class T>
PACKATTN_DEVICE void store_global(T* p, T value) {
  *p = value;
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// Address of the block's dynamic shared memory, a multiple of 1024 bytes: swizzles are XORs on address bits.
PACKATTN_DEVICE uint32_t smem_base() {
  extern __shared__ __align__(1024) unsigned char packattn_shared_memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(packattn_shared_memory));
}

PACKATTN_DEVICE void sts32(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
PACKATTN_DEVICE void sts64(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
PACKATTN_DEVICE void sts128(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
PACKATTN_DEVICE uint32_t lds32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
PACKATTN_DEVICE float2 lds64(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
PACKATTN_DEVICE uint4 lds128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
PACKATTN_DEVICE float4 lds128f(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// 16 bytes from global to shared memory, asynchronously; both addresses are multiples of 16. When !valid, 16 zero bytes
// are written and the source is not read, but must still be some address inside the tensor.
PACKATTN_DEVICE void cp_async16(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// 8 and 4 bytes, the same way; both addresses are multiples of that.
PACKATTN_DEVICE void cp_async8(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(valid ? 8 : 0)
               : "memory");
}
PACKATTN_DEVICE void cp_async4(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}
// Ends a group: the thread's copies since the last commit. Empty groups count.
PACKATTN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the N newest of the calling thread's groups have landed. Other threads see them after a barrier.
template <int N>
PACKATTN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrices ------------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit numbers. Lane i gives the address of row i % 8 of matrix i / 8: 16 bytes, 16-aligned.
// Afterwards lane l holds in r[m] the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix m.
PACKATTN_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
// The same of the transposed matrices: lane l holds the elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
PACKATTN_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// d += A B: 16 x 16 times 16 x 8, elements T, sums in float. Fragments: see the top of the file.
template <class T>
PACKATTN_DEVICE void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_f16<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- numbers -------------------------------------------------------------------------------------------------------

// 2^x to 2 ulp, results under 2^-126 flushed to 0; ex2(-inf) = 0. log2(x) to 2^-22 (absolute near 1). 1/x to 1 ulp.
PACKATTN_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PACKATTN_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PACKATTN_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One number to T and back; round to nearest even, out of range becomes infinite, any NaN 0x7FFF.
template <class T>
PACKATTN_DEVICE uint16_t narrow(float x) {
  uint16_t r;
  if constexpr (is_f16<T>) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  } else {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else  // no such instruction before sm_80
    const uint32_t u = __float_as_uint(x);
    r = static_cast<uint16_t>(x != x ? 0x7FFFu : (u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
#endif
  }
  return r;
}
template <class T>
PACKATTN_DEVICE float widen(uint16_t x) {
  if constexpr (is_f16<T>) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  } else {
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
  }
}

// Two numbers in a register, the first in the low half.
template <class T>
PACKATTN_DEVICE uint32_t pack2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  if constexpr (is_f16<T>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
#else
  return narrow<T>(low) | static_cast<uint32_t>(narrow<T>(high)) << 16;
#endif
}
template <class T>
PACKATTN_DEVICE float2 unpack2(uint32_t pair) {
  float2 v;
  if constexpr (is_f16<T>) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
  } else {
    v.x = __uint_as_float(pair << 16);
    v.y = __uint_as_float(pair & 0xFFFF0000u);
  }
  return v;
}

// The same bits as another type: float to uint32, int to uint32, float to int.
PACKATTN_DEVICE uint32_t fbits(float f) { return __float_as_uint(f); }
PACKATTN_DEVICE uint32_t ibits(int i) { return static_cast<uint32_t>(i); }
PACKATTN_DEVICE int fint(float f) { return __float_as_int(f); }
PACKATTN_DEVICE float bitsf(uint32_t u) { return __uint_as_float(u); }

// How many bits are set.
PACKATTN_DEVICE int popc(uint32_t u) { return __popc(u); }

}  // namespace packattn::cuda::ptx

#endif
