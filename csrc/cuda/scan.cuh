// Prefix scans over a warp and over a block.
//
// A scan combines the values of the threads in order: thread t gets v[0] + ... + v[t-1] for an associative "+", which
// need not commute. A value is a trivially copyable struct of 4-byte words with
//
//   static T identity();          the value that changes nothing
//   T then(const T& next) const;  this one, followed by next
//
// Source of the scheme: Hillis and Steele 1986 within a warp; warp totals once more, by every warp for itself.
#pragma once
#include <cstdint>

#include "ptx.cuh"

namespace packattn::cuda {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;  // of a block

// Shared memory that block_scan needs.
template <class T>
constexpr int kBlockScanBytes = kMaxWarps * static_cast<int>(sizeof(T));

template <class T>
struct Words {
  static_assert(sizeof(T) % 4 == 0);
  static constexpr int kCount = static_cast<int>(sizeof(T) / 4);
  uint32_t word[kCount];
};

template <class T>
PACKATTN_DEVICE Words<T> words_of(const T& value) {
  Words<T> words;
  __builtin_memcpy(&words, &value, sizeof(T));
  return words;
}

template <class T>
PACKATTN_DEVICE T from_words(const Words<T>& words) {
  T value;
  __builtin_memcpy(&value, &words, sizeof(T));
  return value;
}

// The value of the lane `delta` below; lanes under delta get their own. All 32 lanes take part.
template <class T>
PACKATTN_DEVICE T lane_below(const T& value, int delta) {
  Words<T> words = words_of(value);
#pragma unroll
  for (int i = 0; i < Words<T>::kCount; ++i) words.word[i] = ptx::shfl_up(words.word[i], delta);
  return from_words(words);
}

template <class T>
PACKATTN_DEVICE T value_of_lane(const T& value, int lane) {
  Words<T> words = words_of(value);
#pragma unroll
  for (int i = 0; i < Words<T>::kCount; ++i) words.word[i] = ptx::shfl(words.word[i], lane);
  return from_words(words);
}

template <class T>
PACKATTN_DEVICE void store_shared(uint32_t address, const T& value) {
  const Words<T> words = words_of(value);
#pragma unroll
  for (int i = 0; i < Words<T>::kCount; ++i) ptx::sts32(address + 4 * i, words.word[i]);
}

template <class T>
PACKATTN_DEVICE T load_shared(uint32_t address) {
  Words<T> words;
#pragma unroll
  for (int i = 0; i < Words<T>::kCount; ++i) words.word[i] = ptx::lds32(address + 4 * i);
  return from_words(words);
}

// Lane l gets the values of the lanes 0 to l, combined.
template <class T>
PACKATTN_DEVICE T warp_inclusive_scan(T value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const T below = lane_below(value, delta);
    if (lane >= delta) value = below.then(value);
  }
  return value;
}

template <class T>
struct Scanned {
  T before;  // the values of all threads before this one, combined
  T total;   // of all threads of the block
};

// For blocks of whole warps, up to 1024 threads. `shared`: kBlockScanBytes<T> bytes of shared memory that nothing but
// block_scan uses; any number of scans may follow each other.
template <class T>
PACKATTN_DEVICE Scanned<T> block_scan(const T& value, uint32_t shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;

  const T inclusive = warp_inclusive_scan(value);
  if (lane == kWarp - 1) store_shared(shared + static_cast<uint32_t>(warp * sizeof(T)), inclusive);
  ptx::block_sync();
  T warp_total = T::identity();
  if (lane < warps) warp_total = load_shared<T>(shared + static_cast<uint32_t>(lane * sizeof(T)));
  const T totals = warp_inclusive_scan(warp_total);
  ptx::block_sync();  // the next scan may write there

  Scanned<T> result;
  result.total = value_of_lane(totals, kWarp - 1);
  const T warps_before = value_of_lane(totals, warp > 0 ? warp - 1 : 0);
  const T lanes_before = lane_below(inclusive, 1);
  result.before = lane > 0 ? lanes_before : T::identity();
  if (warp > 0) result.before = warps_before.then(result.before);
  return result;
}

}  // namespace packattn::cuda
