// Happens-before among the threads of a block: which accesses a thread may rely on having been made.
//
// Every warp has a time, which advances when it (or one of its threads) releases what was done. An access is stamped
// with its thread and the time of its warp; thread t may rely on it iff t has learnt, through a chain of barriers, of
// that thread's work up to that time. (Vector clocks; see Flanagan and Freund, "FastTrack", 2009.)
//
// As long as whole warps meet (__syncthreads, __syncwarp, named barriers), the lanes of a warp know the same, and a
// small matrix of warps by warps says everything. An mbarrier, at which single threads arrive, makes the block keep
// what every thread knows of every other, and of agents that are no threads: bulk copies and matrix products.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace packattn::emu {

using Time = uint32_t;  // 0: never

class Order {
 public:
  static constexpr int kAgents = 64;    // 32 mbarriers (bulk copies), then 32 warps (wgmma reads)
  using Knowledge = std::vector<Time>;  // of every warp or, after individual(), of every thread and agent

  void reset(int threads) {
    threads_ = threads;
    warps_ = threads / 32;
    individual_ = false;
    columns_ = static_cast<size_t>(warps_);
    time_.assign(columns_, 1);
    known_.assign(columns_ * columns_, 0);
  }
  int threads() const { return threads_; }
  Time now(int thread) const { return time_[static_cast<size_t>(thread / 32)]; }

  bool knows(int thread, int other, Time time) const {
    if (other == thread || time == 0) return true;
    return individual_ ? row(thread)[other] >= time : row(thread / 32)[other / 32] >= time;
  }
  // The lanes of `mask` in `warp`, all at one time.
  bool knows_lanes(int thread, int warp, uint32_t mask, Time time) const {
    if (thread / 32 == warp) mask &= ~(1u << thread % 32);
    if (mask == 0) return true;
    if (!individual_) return row(thread / 32)[warp] >= time;
    for (; mask; mask &= mask - 1) {
      if (row(thread)[warp * 32 + __builtin_ctz(mask)] < time) return false;
    }
    return true;
  }

  void block_sync() { join(0, warps_); }
  void warp_sync(int warp) {
    if (individual_) return join(warp, 1);
    row(warp)[warp] = now(warp * 32);
    advance(warp);
  }

  // ---- barriers that some arrive at and others wait for
  Knowledge nothing() const { return Knowledge(columns_, 0); }

  // Adds what a whole warp knows, its own work so far included. The warp must not go on before advance(warp).
  void release_warp(int warp, Knowledge& into) const {
    if (individual_) {
      for (int t = warp * 32; t < warp * 32 + 32; ++t) release(t, into);
    } else {
      merge(row(warp), into);
      into[static_cast<size_t>(warp)] = now(warp * 32);
    }
  }
  void acquire_warp(int warp, const Knowledge& from) {
    if (!individual_) return merge_row(from, warp);
    for (int t = warp * 32; t < warp * 32 + 32; ++t) merge_row(from, t);
  }
  void advance(int warp) { ++time_[static_cast<size_t>(warp)]; }

  // The same for one thread; after individual() only.
  void release(int thread, Knowledge& into) const {
    merge(row(thread), into);
    into[static_cast<size_t>(thread)] = now(thread);
  }
  void acquire(int thread, const Knowledge& from) { merge_row(from, thread); }
  // `thread` learns of an agent's work, all of it that was done up to `time`.
  void learn(int thread, int agent, Time time) { row(thread)[agent] = std::max(row(thread)[agent], time); }

  void individual() {
    if (individual_) return;
    const Knowledge by_warp = std::move(known_);
    const size_t warps = columns_;
    columns_ = static_cast<size_t>(threads_ + kAgents);
    known_.assign(static_cast<size_t>(threads_) * columns_, 0);
    for (size_t t = 0; t < static_cast<size_t>(threads_); ++t) {
      for (size_t o = 0; o < static_cast<size_t>(threads_); ++o) {
        known_[t * columns_ + o] = by_warp[t / 32 * warps + o / 32];
      }
    }
    individual_ = true;
  }

 private:
  Time* row(int r) { return known_.data() + static_cast<size_t>(r) * columns_; }
  const Time* row(int r) const { return known_.data() + static_cast<size_t>(r) * columns_; }
  void merge(const Time* from, Knowledge& into) const {
    for (size_t i = 0; i < columns_; ++i) into[i] = std::max(into[i], from[i]);
  }
  void merge_row(const Knowledge& from, int r) {
    for (size_t i = 0; i < columns_; ++i) row(r)[i] = std::max(row(r)[i], from[i]);
  }
  // All threads of these warps meet.
  void join(int first, int count) {
    Knowledge all = nothing();
    for (int w = first; w < first + count; ++w) release_warp(w, all);
    for (int w = first; w < first + count; ++w) {
      acquire_warp(w, all);
      advance(w);
    }
  }

  int threads_ = 0, warps_ = 0;
  bool individual_ = false;
  size_t columns_ = 0;
  std::vector<Time> time_;   // by warp
  std::vector<Time> known_;  // [warps, warps] or [threads, threads + agents]
};

}  // namespace packattn::emu
