// What the threads of a block and the lanes of a warp do together: barriers, shuffles, votes.
#pragma once
#include <cstring>

#include "launch.h"

namespace packattn::emu {

// Collectives that must not be mixed in one meeting. An Element may be added to kMma.
enum Operation : int {
  kWarpSync,
  kShuffleXor,
  kShuffle,
  kShuffleUp,
  kBallot,
  kReduceMin,
  kReduceMax,
  kLdmatrix,
  kLdmatrixTrans,
  kNamedArrive,
  kMma,
  kMmaEnd = kMma + 2,
  kSm90,
};

// All 32 lanes of the warp meet here. Each has left its operands in exchange.in[...][lane]; the last to come runs
// action(warp, site) for all of them, and each finds its results in exchange.out[...][lane] afterwards.
template <class Action>
inline void meet(int operation, Site site, const char* what, Action&& action) {
  Block& block = this_block();
  Thread& me = this_thread();
  Warp& warp = block.warps[static_cast<size_t>(me.warp())];
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.site = site;
  } else if (warp.operation != operation || !same(warp.site, site)) {
    complain(kDivergence, site, warp.site,
             "thread %d is at %s while other lanes of its warp are at a collective at %s:%u", me.number, what,
             file_name(warp.site), warp.site.line());
  }
  warp.arrived |= 1u << me.lane();
  if (warp.arrived != 0xFFFFFFFFu) return block.wait(State::at_warp, what, site);
  warp.arrived = 0;
  action(warp, site);
  Thread* lanes = &block.threads[static_cast<size_t>(me.warp() * 32)];
  for (int l = 0; l < 32; ++l) lanes[l].state = State::ready;
  warp.ready = 0xFFFFFFFFu;
}
inline Exchange& my_exchange() { return this_block().warps[static_cast<size_t>(this_thread().warp())].exchange; }

inline void block_sync(Site site) {
  Block& block = this_block();
  if (block.at_barrier == 0) {
    block.barrier_site = site;
  } else if (!same(block.barrier_site, site)) {
    complain(kDivergence, site, block.barrier_site, "__syncthreads meets the __syncthreads at %s:%u",
             file_name(block.barrier_site), block.barrier_site.line());
  }
  if (++block.at_barrier != block.thread_count) return block.wait(State::at_block, "__syncthreads", site);
  block.at_barrier = 0;
  ++report().counters.block_barriers;
  block.order.block_sync();
  for (Thread& t : block.threads) {
    if (t.state == State::at_block) block.make_ready(t);
  }
}

// ---- named barriers: who arrives gives what it knows, who syncs receives it too
inline NamedBarrier* named_barrier(int id, int threads, Site site) {
  Block& block = this_block();
  if (id < 1 || id > 15 || threads <= 0 || threads % 32 || threads > block.thread_count) {
    complain(kProtocol, site, Site(), "named barrier %d of %d threads", id, threads);
    return nullptr;
  }
  NamedBarrier& barrier = block.named_barriers[id];
  if (barrier.arrived == 0) {
    barrier.threads = threads;
    barrier.warps = barrier.waiting_warps = 0;
    barrier.site = site;
    barrier.knowledge = block.order.nothing();
  } else if (barrier.threads != threads) {
    complain(kProtocol, site, barrier.site, "named barrier %d is for %d threads here and for %d at %s", id, threads,
             barrier.threads, place(barrier.site).c_str());
  }
  return &barrier;
}
// A whole warp has come.
inline void arrive(NamedBarrier& barrier, int id, int warp, bool waits, Site site) {
  Block& block = this_block();
  if (barrier.warps >> warp & 1) {
    complain(kProtocol, site, barrier.site, "warp %d arrives twice in one phase of named barrier %d", warp, id);
  }
  barrier.warps |= 1u << warp;
  barrier.waiting_warps |= static_cast<uint32_t>(waits) << warp;
  block.order.release_warp(warp, barrier.knowledge);
  block.order.advance(warp);
  barrier.arrived += 32;
  if (barrier.arrived < barrier.threads) return;
  barrier.arrived = 0;
  ++barrier.phase;
  ++report().counters.block_barriers;
  for (uint32_t warps = barrier.waiting_warps; warps; warps &= warps - 1) {
    const int w = __builtin_ctz(warps);
    block.order.acquire_warp(w, barrier.knowledge);
    for (int t = w * 32; t < w * 32 + 32; ++t) {
      Thread& thread = block.threads[static_cast<size_t>(t)];
      if (thread.state == State::at_named_barrier && thread.named_barrier == id) block.make_ready(thread);
    }
  }
}
inline void named_sync(int id, int threads, Site site) {
  NamedBarrier* const barrier = named_barrier(id, threads, site);
  if (!barrier) return;
  Block& block = this_block();
  Thread& me = this_thread();
  Warp& warp = block.warps[static_cast<size_t>(me.warp())];
  const uint32_t phase = barrier->phase;
  me.named_barrier = id;
  warp.at_named_barrier |= 1u << me.lane();
  if (warp.at_named_barrier == 0xFFFFFFFFu) {
    warp.at_named_barrier = 0;
    me.state = State::at_named_barrier;  // so that it counts among those that wait
    arrive(*barrier, id, me.warp(), true, site);
    if (barrier->phase != phase) return;
  }
  while (barrier->phase == phase) block.wait(State::at_named_barrier, "a named barrier", site);
}
inline void named_arrive(int id, int threads, Site site) {
  const int lane = this_thread().lane();
  my_exchange().in[0][lane] = static_cast<uint32_t>(id);
  meet(kNamedArrive, site, "bar.arrive", [id, threads](Warp& warp, Site at) {
    for (uint32_t other : warp.exchange.in[0]) {
      if (other == static_cast<uint32_t>(id)) continue;
      complain(kDivergence, at, Site(), "lanes of one warp arrive at different named barriers");
    }
    if (NamedBarrier* const barrier = named_barrier(id, threads, at)) arrive(*barrier, id, warp.number, false, at);
  });
}

inline void warp_sync(Site site) {
  meet(kWarpSync, site, "__syncwarp", [](Warp& warp, Site) {
    ++report().counters.warp_barriers;
    this_block().order.warp_sync(warp.number);
  });
}

// source_of(lane, argument): the lane whose value it gets; its own where that is none.
template <class T, class SourceOf>
inline T shuffle(Operation operation, T value, int argument, Site site, SourceOf source_of) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  constexpr int kWords = sizeof(T) / 4;
  const int lane = this_thread().lane();
  Exchange& exchange = my_exchange();
  uint32_t words[kWords];
  std::memcpy(words, &value, sizeof(T));
  for (int i = 0; i < kWords; ++i) exchange.in[i][lane] = words[i];
  exchange.in[2][lane] = static_cast<uint32_t>(argument);
  meet(operation, site, "shfl", [source_of](Warp& warp, Site) {
    ++report().counters.shuffles;
    for (int l = 0; l < 32; ++l) {
      int source = source_of(l, static_cast<int>(warp.exchange.in[2][l]));
      if (source < 0 || source > 31) source = l;
      for (int i = 0; i < kWords; ++i) warp.exchange.out[i][l] = warp.exchange.in[i][source];
    }
  });
  for (int i = 0; i < kWords; ++i) words[i] = exchange.out[i][lane];
  std::memcpy(&value, words, sizeof(T));
  return value;
}

// Every lane gets fn over all lanes' values.
template <class T, class Fn>
inline T reduce(Operation operation, T value, Site site, const char* what, Fn fn) {
  static_assert(sizeof(T) == 4);
  const int lane = this_thread().lane();
  Exchange& exchange = my_exchange();
  exchange.in[0][lane] = __builtin_bit_cast(uint32_t, value);
  meet(operation, site, what, [fn](Warp& warp, Site) {
    T all = __builtin_bit_cast(T, warp.exchange.in[0][0]);
    for (int l = 1; l < 32; ++l) all = fn(all, __builtin_bit_cast(T, warp.exchange.in[0][l]));
    for (uint32_t& out : warp.exchange.out[0]) out = __builtin_bit_cast(uint32_t, all);
  });
  return __builtin_bit_cast(T, exchange.out[0][lane]);
}
inline uint32_t ballot(bool vote, Site site) {
  const uint32_t mine = static_cast<uint32_t>(vote) << this_thread().lane();
  return reduce(kBallot, mine, site, "vote", [](uint32_t a, uint32_t b) { return a | b; });
}

}  // namespace packattn::emu
