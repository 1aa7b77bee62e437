// The functions of csrc/cuda/ptx_sm90.cuh on the CPU. What each does is described there.
#pragma once
#include "wgmma.h"

namespace packattn::cuda {

using TmaMap = emu::TensorMap;

namespace ptx {

#define PACKATTN_SITE Site site = Site::current()

inline void mbarrier_init(uint32_t address, uint32_t count, PACKATTN_SITE) { emu::mbarrier_init(address, count, site); }
inline void fence_mbarrier_init() { emu::proxy_fence(); }
inline void fence_proxy_async() { emu::proxy_fence(); }
inline void mbarrier_arrive(uint32_t address, PACKATTN_SITE) { emu::mbarrier_arrive(address, 0, site); }
inline void mbarrier_arrive_expect(uint32_t address, uint32_t bytes, PACKATTN_SITE) {
  emu::mbarrier_arrive(address, bytes, site);
}
inline void mbarrier_wait(uint32_t address, uint32_t parity, PACKATTN_SITE) {
  emu::mbarrier_wait(address, parity, site);
}

inline void turn(int warpgroup, int warpgroups, bool begin, PACKATTN_SITE) {
  emu::turn(warpgroup, warpgroups, begin, site);
}
template <int N>
void registers_increase(PACKATTN_SITE) {
  emu::set_registers(N, true, site);
}
template <int N>
void registers_decrease(PACKATTN_SITE) {
  emu::set_registers(N, false, site);
}

inline void tma_load_2d(uint32_t destination, const TmaMap* map, uint32_t barrier, int c0, int c1, PACKATTN_SITE) {
  emu::tensor_copy(destination, map, barrier, {c0, c1}, site);
}
inline void tma_load_3d(uint32_t destination, const TmaMap* map, uint32_t barrier, int c0, int c1, int c2,
                        PACKATTN_SITE) {
  emu::tensor_copy(destination, map, barrier, {c0, c1, c2}, site);
}

inline void wgmma_fence(PACKATTN_SITE) { emu::wgmma_fence(site); }
inline void wgmma_commit(PACKATTN_SITE) { emu::wgmma_commit(site); }
template <int N>
void wgmma_wait(PACKATTN_SITE) {
  emu::wgmma_wait(N, {}, site);
}
template <int N, int K>
void wgmma_wait(float (&d)[K], PACKATTN_SITE) {
  emu::wgmma_wait(N, {d}, site);
}
template <int N, int K, int L>
void wgmma_wait(float (&d)[K], float (&e)[L], PACKATTN_SITE) {
  emu::wgmma_wait(N, {d, e}, site);
}
template <int N, int K, int L, int M>
void wgmma_wait(float (&d)[K], float (&e)[L], float (&f)[M], PACKATTN_SITE) {
  emu::wgmma_wait(N, {d, e, f}, site);
}
template <class T, bool A_MN, bool B_MN, int K>
void wgmma_ss(float (&d)[K], uint64_t a, uint64_t b, bool accumulate, PACKATTN_SITE) {
  emu::wgmma(element<T>, 2 * K, d, nullptr, a, b, accumulate, A_MN, B_MN, site);
}
template <class T, bool B_MN, int K>
void wgmma_rs(float (&d)[K], const uint32_t (&a)[4], uint64_t b, bool accumulate, PACKATTN_SITE) {
  emu::wgmma(element<T>, 2 * K, d, a, 0, b, accumulate, false, B_MN, site);
}
inline void finish_before_here(float) {}
inline void finish_before_here(uint32_t) {}

#undef PACKATTN_SITE
}  // namespace ptx
}  // namespace packattn::cuda
