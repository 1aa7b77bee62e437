// The functions of csrc/cuda/ptx.cuh on the CPU. What each does is described there; here is only how it is emulated.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "matrix.h"
#include "memory.h"
#include "warp.h"

#define PACKATTN_DEVICE inline

namespace packattn {
namespace cuda::ptx {

// The place of the call, for the reports.
using Site = emu::Site;
#define PACKATTN_SITE Site site = Site::current()

template <class T>
inline constexpr emu::Element element = is_f16<T> ? emu::Element::f16 : emu::Element::bf16;

// ---- threads
template <class T>
void hold(T&) {}
inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline int block_index() { return static_cast<int>(blockIdx.x); }

inline void block_sync(PACKATTN_SITE) { emu::block_sync(site); }
inline void warp_sync(PACKATTN_SITE) { emu::warp_sync(site); }
inline void named_sync(int id, int threads, PACKATTN_SITE) { emu::named_sync(id, threads, site); }
inline void named_arrive(int id, int threads, PACKATTN_SITE) { emu::named_arrive(id, threads, site); }

template <class T>
T shfl_xor(T value, int mask, PACKATTN_SITE) {
  return emu::shuffle(emu::kShuffleXor, value, mask, site, [](int lane, int m) { return lane ^ m; });
}
template <class T>
T shfl(T value, int source, PACKATTN_SITE) {
  return emu::shuffle(emu::kShuffle, value, source, site, [](int, int s) { return s & 31; });
}
template <class T>
T shfl_up(T value, int delta, PACKATTN_SITE) {
  return emu::shuffle(emu::kShuffleUp, value, delta, site, [](int lane, int d) { return lane - d; });
}
inline uint32_t ballot(bool b, PACKATTN_SITE) { return emu::ballot(b, site); }
inline int reduce_min(int value, PACKATTN_SITE) {
  return emu::reduce(emu::kReduceMin, value, site, "redux.min", [](int a, int b) { return std::min(a, b); });
}
inline int reduce_max(int value, PACKATTN_SITE) {
  return emu::reduce(emu::kReduceMax, value, site, "redux.max", [](int a, int b) { return std::max(a, b); });
}
inline bool any_lane(bool b, PACKATTN_SITE) { return emu::ballot(b, site) != 0; }
inline bool all_lanes(bool b, PACKATTN_SITE) { return emu::ballot(b, site) == 0xFFFFFFFFu; }

// ---- global memory
template <class T>
T load_global(const T* p, PACKATTN_SITE) {
  static_assert(std::is_trivially_copyable_v<T>);
  return emu::load_global(p, sizeof(T), site) ? *p : T{};
}
template <class T>
void store_global(T* p, std::type_identity_t<T> value, PACKATTN_SITE) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (emu::store_global(p, sizeof(T), site)) *p = value;
}

// ---- shared memory
inline uint32_t smem_base() { return 0; }

template <class T>
T load_shared(uint32_t address, Site site) {
  T value;
  emu::load_shared(address, &value, sizeof(T), site);
  return value;
}
inline void sts32(uint32_t address, uint32_t v, PACKATTN_SITE) { emu::store_shared(address, &v, 4, site); }
inline void sts64(uint32_t address, float2 v, PACKATTN_SITE) { emu::store_shared(address, &v, 8, site); }
inline void sts128(uint32_t address, uint4 v, PACKATTN_SITE) { emu::store_shared(address, &v, 16, site); }
inline uint32_t lds32(uint32_t address, PACKATTN_SITE) { return load_shared<uint32_t>(address, site); }
inline float2 lds64(uint32_t address, PACKATTN_SITE) { return load_shared<float2>(address, site); }
inline uint4 lds128(uint32_t address, PACKATTN_SITE) { return load_shared<uint4>(address, site); }
inline float4 lds128f(uint32_t address, PACKATTN_SITE) { return load_shared<float4>(address, site); }

inline void cp_async16(uint32_t destination, const void* source, bool valid, PACKATTN_SITE) {
  emu::async_copy(destination, source, 16, valid, site);
}
inline void cp_async8(uint32_t destination, const void* source, bool valid, PACKATTN_SITE) {
  emu::async_copy(destination, source, 8, valid, site);
}
inline void cp_async4(uint32_t destination, const void* source, bool valid, PACKATTN_SITE) {
  emu::async_copy(destination, source, 4, valid, site);
}
inline void cp_async_commit() { emu::async_commit(); }
template <int N>
void cp_async_wait() {
  emu::async_wait(N);
}

// ---- matrices
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, PACKATTN_SITE) {
  emu::ldmatrix_x4(r, row_address, false, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address, PACKATTN_SITE) {
  emu::ldmatrix_x4(r, row_address, true, site);
}
template <class T>
void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, PACKATTN_SITE) {
  emu::mma_16x8x16(element<T>, d, a, b0, b1, site);
}

// ---- numbers
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.f : x; }
inline float ex2(float x) { return flush(std::exp2(x)); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return flush(1.f / x); }

template <class T>
uint16_t narrow(float x) {
  return emu::narrow(element<T>, x);
}
template <class T>
float widen(uint16_t x) {
  return emu::widen(element<T>, x);
}
template <class T>
uint32_t pack2(float low, float high) {
  return narrow<T>(low) | static_cast<uint32_t>(narrow<T>(high)) << 16;
}
template <class T>
float2 unpack2(uint32_t pair) {
  return {widen<T>(static_cast<uint16_t>(pair)), widen<T>(static_cast<uint16_t>(pair >> 16))};
}

inline uint32_t fbits(float f) { return __builtin_bit_cast(uint32_t, f); }
inline uint32_t ibits(int i) { return static_cast<uint32_t>(i); }
inline int fint(float f) { return __builtin_bit_cast(int, f); }
inline float bitsf(uint32_t u) { return __builtin_bit_cast(float, u); }
inline int popc(uint32_t u) { return __builtin_popcount(u); }

#undef PACKATTN_SITE
}  // namespace cuda::ptx
}  // namespace packattn
