// What the threads of a block and the lanes of a warp do together: barriers, shuffles, votes.
#pragma once
#include "launch.h"

namespace packattn::emu {

// All 32 lanes of the warp meet here. The last to come runs fn(deposits) for all of them, with every other lane's stack
// at rest. operation: a number that tells collectives apart.
template <class Fn>
inline void meet(int operation, Site site, const char* what, const Deposit& deposit, Fn&& fn) {
  Block& block = this_block();
  Thread& me = this_thread();
  Warp& warp = block.warps[static_cast<size_t>(me.warp())];
  warp.deposits[me.lane()] = deposit;
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
  fn(warp.deposits);
  Thread* lanes = &block.threads[static_cast<size_t>(me.warp() * 32)];
  for (int l = 0; l < 32; ++l) lanes[l].state = State::ready;
  warp.ready = 0xFFFFFFFFu;
}

enum Operation : int {
  kWarpSync = 1,
  kShuffleXor,
  kShuffle,
  kShuffleUp,
  kBallot,
  kLdmatrix,
  kLdmatrixTrans,
  kMma,
  kMmaEnd = kMma + 2,
  kSm90
};

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

inline void warp_sync(Site site) {
  meet(kWarpSync, site, "__syncwarp", {}, [](Deposit*) {
    ++report().counters.warp_barriers;
    this_block().order.warp_sync(this_thread().warp());
  });
}

// source_of(lane): the lane whose value it gets.
template <class T, class SourceOf>
inline T shuffle(int operation, T value, int argument, Site site, SourceOf source_of) {
  T out{};
  meet(operation, site, "shfl", {{&value, &argument, nullptr}, &out}, [source_of](Deposit* lanes) {
    ++report().counters.shuffles;
    T all[32];
    for (int l = 0; l < 32; ++l) all[l] = *static_cast<const T*>(lanes[l].in[0]);
    for (int l = 0; l < 32; ++l) {
      const int source = source_of(l, *static_cast<const int*>(lanes[l].in[1]));
      *static_cast<T*>(lanes[l].out) = all[source >= 0 && source < 32 ? source : l];
    }
  });
  return out;
}

inline uint32_t ballot(bool vote, Site site) {
  uint32_t out = 0;
  meet(kBallot, site, "vote", {{&vote, nullptr, nullptr}, &out}, [](Deposit* lanes) {
    uint32_t all = 0;
    for (int l = 0; l < 32; ++l) all |= static_cast<uint32_t>(*static_cast<const bool*>(lanes[l].in[0])) << l;
    for (int l = 0; l < 32; ++l) *static_cast<uint32_t*>(lanes[l].out) = all;
  });
  return out;
}

}  // namespace packattn::emu
