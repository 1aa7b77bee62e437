// mbarriers, fences between proxies, setmaxnreg.
#pragma once
#include "warp.h"

namespace packattn::emu {

inline HopperState& this_hopper() { return *this_block().hopper; }
inline WarpOfHopper& this_warp_of_hopper() { return this_hopper().warps[static_cast<size_t>(this_thread().warp())]; }

enum HopperOperation : int {
  kSetRegisters = kSm90,
  kWgmma,
  kWgmmaFence,
  kWgmmaCommit,
  kWgmmaWait,
};

// ---- mbarriers: 8 bytes of shared memory each. Phases end when `count` threads have arrived and every byte that was
// announced has landed.
inline int mbarrier_at(uint32_t address, Site site) {
  const auto& all = this_hopper().mbarriers;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].address == address) return static_cast<int>(i);
  }
  complain(kProtocol, site, Site(), "shared address %u is no initialised mbarrier", address);
  return -1;
}
inline Mbarrier& mbarrier(int i) { return this_hopper().mbarriers[static_cast<size_t>(i)]; }

inline void mbarrier_init(uint32_t address, uint32_t count, Site site) {
  Block& block = this_block();
  const Thread& me = this_thread();
  block.order.individual();
  if (!block.shared.accessible(me.number, address, 8, 8, site, "mbarrier.init")) return;
  block.shared.on_write(block.order, me.number, address, 8, site, SharedMemory::Content::valid, me.number,
                        me.proxy_fences);
  auto& all = this_hopper().mbarriers;
  if (all.size() == HopperState::kMbarriers) {
    complain(kProtocol, site, Site(), "more than %d mbarriers; the emulator keeps no more", HopperState::kMbarriers);
    return;
  }
  all.push_back({address, count, count, 0, 0, block.order.nothing(), block.order.nothing()});
}

inline void end_phase_if_complete(Mbarrier& m) {
  if (m.left != 0 || m.pending_bytes != 0) return;
  m.complete = m.arrived;
  std::fill(m.arrived.begin(), m.arrived.end(), 0);
  ++m.phase;
  m.left = m.count;
  Block& block = this_block();
  for (Thread& t : block.threads) {
    if (t.state == State::at_mbarrier && t.mbarrier == m.address && (m.phase & 1) != t.parity) block.make_ready(t);
  }
}

// bytes: announced with the arrival, to be landed by bulk copies.
inline void mbarrier_arrive(uint32_t address, uint32_t bytes, Site site) {
  Block& block = this_block();
  const int thread = this_thread().number, i = mbarrier_at(address, site);
  if (i < 0) return;
  block.shared.on_read(block.order, thread, address, 8, site);
  Mbarrier& m = mbarrier(i);
  block.order.release(thread, m.arrived);
  block.order.advance(thread / 32);
  m.pending_bytes += bytes;
  if (m.left == 0) {
    complain(kProtocol, site, Site(), "more arrivals on the mbarrier at %u than its count %u", address, m.count);
  } else {
    --m.left;
  }
  end_phase_if_complete(m);
}

// Until the phase of this parity is complete.
inline void mbarrier_wait(uint32_t address, uint32_t parity, Site site) {
  Block& block = this_block();
  Thread& me = this_thread();
  const int i = mbarrier_at(address, site);
  if (i < 0) return;
  block.shared.on_read(block.order, me.number, address, 8, site);
  me.mbarrier = address;
  me.parity = parity;
  while ((mbarrier(i).phase & 1) == parity) block.wait(State::at_mbarrier, "mbarrier wait", site);
  block.order.acquire(me.number, mbarrier(i).complete);
}

inline void proxy_fence() { ++this_thread().proxy_fences; }

// States the order that barriers are meant to give: warpgroup g of n (whose first is warps 4 to 7) begins turn k only
// when g - 1 has ended its turn k; for g = 0, when the last one has ended turn k - 1.
inline void turn(int g, int n, bool begin, Site site) {
  if (this_thread().lane()) return;
  WarpOfHopper& mine = this_warp_of_hopper();
  if (!begin) {
    ++mine.turns_done;
    return;
  }
  const int k = ++mine.turns_begun, before = g ? g - 1 : n - 1, needed = g ? k : k - 1;
  for (int i = 0; i < 4; ++i) {
    if (this_hopper().warps[static_cast<size_t>(4 + before * 4 + i)].turns_done >= needed) continue;
    complain(kProtocol, site, Site(), "warpgroup %d begins turn %d while warpgroup %d has not ended its turn %d", g, k,
             before, needed);
    return;
  }
}

inline void set_registers(int count, bool more, Site site) {
  meet(kSetRegisters, site, "setmaxnreg", [count, more](Warp& warp, Site at) {
    WarpOfHopper& mine = this_hopper().warps[static_cast<size_t>(warp.number)];
    if (count % 8 || count < 24 || count > 256) complain(kProtocol, at, Site(), "setmaxnreg %d", count);
    if (more ? count < mine.registers : count > mine.registers) {
      complain(kProtocol, at, Site(), "setmaxnreg.%s from %d to %d", more ? "inc" : "dec", mine.registers, count);
    }
    mine.registers = count;
  });
}

}  // namespace packattn::emu
