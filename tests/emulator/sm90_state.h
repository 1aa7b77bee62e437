// What a block has of Hopper's asynchronous machinery: barriers in shared memory, bulk copies under way,
// matrix products under way, registers handed from warp to warp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "block.h"
#include "numbers.h"

namespace packattn::emu {

struct Mbarrier {
  uint32_t address = 0, count = 0, left = 0, phase = 0;
  int64_t pending_bytes = 0;
  Order::Knowledge arrived, complete;  // what those know who arrived in this phase; in the last complete one
};

struct BulkCopy {
  std::function<void()> land;
};

// One wgmma.mma_async of one warp, which computes 16 of the 64 rows.
struct Wgmma {
  Element element;
  int n;
  uint64_t a, b;  // shared memory descriptors; a counts unless a_registers
  bool a_mn, b_mn, accumulate, a_in_registers;
  int group;
  uint32_t sequence;  // of the warp, from 1
  Site site;
  float* accumulators[32];
  const uint32_t* a_pointers[32];
  uint32_t a_registers[32][4];
};

struct WarpOfHopper {
  std::deque<Wgmma> products;                      // issued, not known to be complete
  std::map<float*, std::vector<float>> in_flight;  // by lane 0's accumulators: what they will hold, [32, n / 2]
  int groups = 0;                                  // committed
  uint32_t issued = 0;
  bool fenced = false;
  int registers = 0;  // per thread, after setmaxnreg
  int turns_begun = 0, turns_done = 0;
};

class HopperState {
 public:
  static constexpr int kMbarriers = 32;

  std::vector<Mbarrier> mbarriers;
  std::deque<BulkCopy> copies;
  std::vector<WarpOfHopper> warps;

  explicit HopperState(Block& block) : warps(static_cast<size_t>(block.warp_count)), block_(block) {
    for (WarpOfHopper& w : warps) w.registers = registers_at_launch();
  }

  // The most that a block of this size may have been compiled for.
  int registers_at_launch() const { return std::min(248, 65536 / (block_.thread_count * block_.resident) / 8 * 8); }

  // Lets one bulk copy land, when every thread waits. False if none is under way.
  bool land_one_copy() {
    if (copies.empty()) return false;
    const size_t i = config().policy == 0 ? 0 : block_.random() % copies.size();
    const BulkCopy copy = copies[i];
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    copy.land();
    return true;
  }

  void check_end() const {
    if (!copies.empty()) complain(kLeftover, Site(), Site(), "%zu bulk copies never waited for", copies.size());
    int registers = 0;
    for (size_t w = 0; w < warps.size(); ++w) {
      const WarpOfHopper &warp = warps[w], &first = warps[w / 4 * 4];  // of its warpgroup
      registers += warp.registers;
      if (!warp.products.empty()) {
        complain(kLeftover, warp.products[0].site, Site(), "warp %zu exits with %zu wgmma not waited for", w,
                 warp.products.size());
      }
      if (warp.registers != first.registers) {
        complain(kProtocol, Site(), Site(), "warps of one warpgroup ended with different setmaxnreg values");
      }
      if (warp.issued != first.issued) {
        complain(kProtocol, Site(), Site(), "warps of one warpgroup issued different numbers of wgmma");
      }
    }
    if (registers > block_.warp_count * registers_at_launch()) {
      complain(kProtocol, Site(), Site(), "setmaxnreg asks for %d registers over all warps, the block owns %d",
               registers * 32, block_.warp_count * registers_at_launch() * 32);
    }
  }

 private:
  Block& block_;
};

}  // namespace packattn::emu
