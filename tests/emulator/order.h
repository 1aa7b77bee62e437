// Happens-before among the threads of a block: which accesses a thread may rely on having been made.
//
// Every warp has a time, which advances when one of its threads releases what it did (at any barrier). An access is
// stamped with its thread and the time of its warp; thread t may rely on it iff t has learnt, through a chain of
// barriers, of that thread's work up to that time. (Vector clocks; see Flanagan and Freund, "FastTrack", 2009.)
//
// As long as a block uses __syncthreads and __syncwarp only, all lanes of a warp know the same, and two numbers per
// warp say everything. The first mbarrier or named barrier makes a block keep the whole matrix of who knows how much of
// whom.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace packattn::emu {

using Time = uint32_t;  // 0: never

class Order {
 public:
  static constexpr int kAgents = 64;  // that are no threads: 32 mbarriers (bulk copies), then 32 warps (wgmma reads)

  void reset(int threads) {
    threads_ = threads;
    stride_ = threads + kAgents;
    const auto warps = static_cast<size_t>(threads / 32);
    time_.assign(warps, 1);
    at_block_sync_.assign(warps, 0);
    at_warp_sync_.assign(warps, 0);
    known_.clear();
  }
  int threads() const { return threads_; }
  int agents_and_threads() const { return stride_; }
  Time now(int thread) const { return time_[static_cast<size_t>(thread / 32)]; }

  bool knows(int thread, int other, Time time) const {
    if (other == thread || time == 0) return true;
    if (!known_.empty()) return row(thread)[other] >= time;
    const auto warp = static_cast<size_t>(other / 32);
    return at_block_sync_[warp] >= time || (thread / 32 == other / 32 && at_warp_sync_[warp] >= time);
  }
  // The lanes of `mask` in `warp`, all at one time.
  bool knows_lanes(int thread, int warp, uint32_t mask, Time time) const {
    if (time == 0) return true;
    if (thread / 32 == warp) mask &= ~(1u << thread % 32);
    if (mask == 0) return true;
    if (known_.empty()) return knows(thread, warp * 32 + __builtin_ctz(mask), time);
    for (; mask; mask &= mask - 1) {
      if (row(thread)[warp * 32 + __builtin_ctz(mask)] < time) return false;
    }
    return true;
  }

  void block_sync() {
    if (known_.empty()) {
      for (size_t w = 0; w < time_.size(); ++w) at_block_sync_[w] = time_[w]++;
    } else {
      join(0, threads_);
    }
  }
  void warp_sync(int warp) {
    if (known_.empty()) {
      const auto w = static_cast<size_t>(warp);
      at_warp_sync_[w] = time_[w]++;
    } else {
      join(warp * 32, 32);
    }
  }

  // ---- barriers that some threads arrive at and others wait for
  using Knowledge = std::vector<Time>;  // of every thread and agent
  Knowledge nothing() const { return Knowledge(static_cast<size_t>(stride_), 0); }

  // Adds what `thread` knows, its own work so far included.
  void release(int thread, Knowledge& into) {
    release_arriving(thread, into);
    advance(thread / 32);
  }
  // The same of a thread that now waits: whoever lets its warp go on advances the warp's time.
  void release_arriving(int thread, Knowledge& into) {
    merge(row(thread), into.data());
    const auto t = static_cast<size_t>(thread);
    into[t] = std::max(into[t], now(thread));
  }
  void advance(int warp) { ++time_[static_cast<size_t>(warp)]; }
  void acquire(int thread, const Knowledge& from) { merge(from.data(), row(thread)); }
  // `thread` learns of an agent's work, all of it that was done up to `time`.
  void learn(int thread, int agent, Time time) { row(thread)[agent] = std::max(row(thread)[agent], time); }

  // From now on individual knowledge. Must come before the first release, acquire or learn.
  void individual() {
    if (!known_.empty()) return;
    std::vector<Time> matrix(static_cast<size_t>(threads_) * static_cast<size_t>(stride_), 0);
    for (int t = 0; t < threads_; ++t) {
      for (int o = 0; o < threads_; ++o) {
        const auto w = static_cast<size_t>(o / 32);
        matrix[static_cast<size_t>(t) * static_cast<size_t>(stride_) + static_cast<size_t>(o)] =
            std::max(at_block_sync_[w], t / 32 == o / 32 ? at_warp_sync_[w] : 0);
      }
    }
    known_ = std::move(matrix);
  }

 private:
  Time* row(int thread) { return known_.data() + static_cast<size_t>(thread) * static_cast<size_t>(stride_); }
  const Time* row(int thread) const {
    return known_.data() + static_cast<size_t>(thread) * static_cast<size_t>(stride_);
  }
  void merge(const Time* from, Time* into) const {
    for (int i = 0; i < stride_; ++i) into[i] = std::max(into[i], from[i]);
  }
  void join(int first, int count) {
    Knowledge all = nothing();
    for (int t = first; t < first + count; ++t) merge(row(t), all.data());
    for (int t = first; t < first + count; ++t) all[static_cast<size_t>(t)] = now(t);
    for (int t = first; t < first + count; ++t) std::copy(all.begin(), all.end(), row(t));
    for (int w = first / 32; w < (first + count) / 32; ++w) ++time_[static_cast<size_t>(w)];
  }

  int threads_ = 0, stride_ = 0;
  std::vector<Time> time_, at_block_sync_, at_warp_sync_;  // by warp
  std::vector<Time> known_;                                // [threads, threads + agents], empty until individual()
};

}  // namespace packattn::emu
