// wgmma: products of 64 rows by a warpgroup, from descriptors of shared memory, complete only in a wait.
#pragma once
#include <initializer_list>

#include "matrix.h"
#include "tma.h"

namespace packattn::emu {

// A shared memory matrix descriptor, taken apart.
struct Descriptor {
  uint32_t start, leading, stride;  // bytes
  int swizzle;                      // span in bytes
  int base_offset;

  explicit Descriptor(uint64_t d)
      : start(static_cast<uint32_t>(d & 0x3FFF) << 4),
        leading(static_cast<uint32_t>(d >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(d >> 32 & 0x3FFF) << 4),
        swizzle(d >> 62 == 0 ? 0 : 256 >> (d >> 62)),
        base_offset(static_cast<int>(d >> 49 & 7)) {}

  // Byte address of the 16-bit element (mn, k): mn a row of A or a column of B, k in the contraction.
  uint32_t k_major(uint32_t mn, uint32_t k) const {
    const uint32_t group = start + mn / 8 * stride;
    if (swizzle == 0) return group + k / 8 * leading + mn % 8 * 16 + k % 8 * 2;
    return swizzled(group + mn % 8 * static_cast<uint32_t>(swizzle) + k * 2, swizzle);
  }
  uint32_t mn_major(uint32_t mn, uint32_t k) const {  // swizzled layouts only
    const auto span = static_cast<uint32_t>(swizzle), width = span / 2;
    if (swizzle == 0) return start;
    return swizzled(start + mn / width * leading + k / 8 * stride + k % 8 * span + mn % width * 2, swizzle);
  }
  uint32_t at(bool is_mn_major, uint32_t mn, uint32_t k) const {
    return is_mn_major ? mn_major(mn, k) : k_major(mn, k);
  }
};

// What an accumulator in flight holds: a signalling NaN, which any arithmetic on it changes.
inline constexpr uint32_t kInFlight = 0xFFA55A5Au;

// Both operands are being read by the tensor core until a wait covers the product.
inline void mark_operands(int warp, const Wgmma& g) {
  Block& block = this_block();
  const auto mark = [&](uint32_t address) {
    address &= ~15u;
    if (!block.shared.accessible(warp * 32, address, 16, 16, g.site, "wgmma operand")) return;
    block.shared.on_agent_read(
        block.order, warp * 32, address, 16, g.site, block.thread_count + HopperState::kMbarriers + warp, g.sequence,
        [&block](int thread) { return block.threads[static_cast<size_t>(thread)].proxy_fences; });
  };
  const auto mark_matrix = [&](const Descriptor& d, bool mn_major, uint32_t first, uint32_t count) {
    for (uint32_t mn = first; mn < first + count; ++mn) {
      for (uint32_t k = 0; k < 16; ++k) {
        if ((mn_major ? mn : k) % 8 == 0) mark(d.at(mn_major, mn, k));
      }
    }
  };
  if (!g.a_in_registers) mark_matrix(Descriptor(g.a), g.a_mn, static_cast<uint32_t>(warp % 4) * 16, 16);
  mark_matrix(Descriptor(g.b), g.b_mn, 0, static_cast<uint32_t>(g.n));
}

inline void compute(int warp, const Wgmma& g, std::vector<float>& accumulators) {
  Block& block = this_block();
  const Descriptor da(g.a), db(g.b);
  const auto fetch = [&](uint32_t address) -> double {
    if (!block.shared.accessible(warp * 32, address, 2, 2, g.site, "wgmma operand")) return NAN;
    uint16_t h;
    std::memcpy(&h, block.shared.at(address), 2);
    return widen(g.element, h);
  };
  mark_operands(warp, g);
  const auto n = static_cast<uint32_t>(g.n);
  std::vector<double> a(16 * 16), b(static_cast<size_t>(n) * 16);
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t k = 0; k < 16; ++k) {
      double& to = a[i * 16 + k];
      if (g.a_in_registers) {  // the fragment A of mma.m16n8k16
        const uint32_t pair = g.a_registers[i % 8 * 4 + k % 8 / 2][i / 8 + k / 8 * 2];
        to = widen(g.element, static_cast<uint16_t>(pair >> 16 * (k % 2)));
      } else {
        to = fetch(da.at(g.a_mn, static_cast<uint32_t>(warp % 4) * 16 + i, k));
      }
    }
  }
  for (uint32_t j = 0; j < n; ++j) {
    for (uint32_t k = 0; k < 16; ++k) b[j * 16 + k] = fetch(db.at(g.b_mn, j, k));
  }
  for (uint32_t l = 0; l < 32; ++l) {
    for (uint32_t i = 0; i < n / 2; ++i) {
      const uint32_t row = l / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + l % 4 * 2 + i % 2;
      float& d = accumulators[l * (n / 2) + i];
      double sum = g.accumulate ? static_cast<double>(d) : 0.0;
      for (uint32_t k = 0; k < 16; ++k) sum += a[row * 16 + k] * b[column * 16 + k];
      d = toward_zero(sum);
    }
  }
}

// a_registers: null for A from shared memory.
inline void wgmma(Element element, int n, float* d, const uint32_t* a_registers, uint64_t a, uint64_t b,
                  bool accumulate, bool a_mn, bool b_mn, Site site) {
  this_block().order.individual();
  const int lane = this_thread().lane();
  Exchange& exchange = my_exchange();
  const auto put = [&](int row, uint64_t value) {
    exchange.in[row][lane] = static_cast<uint32_t>(value);
    exchange.in[row + 1][lane] = static_cast<uint32_t>(value >> 32);
  };
  put(0, a);
  put(2, b);
  put(4, reinterpret_cast<uintptr_t>(d));
  put(6, reinterpret_cast<uintptr_t>(a_registers));
  exchange.in[8][lane] = accumulate;
  meet(kWgmma, site, "wgmma", [=](Warp& warp, Site at) {
    const auto get = [&warp](int row, int l) {
      return warp.exchange.in[row][l] | static_cast<uint64_t>(warp.exchange.in[row + 1][l]) << 32;
    };
    WarpOfHopper& mine = this_warp_of_hopper();
    ++report().counters.wgmma;
    const auto words = static_cast<size_t>(n / 2);
    Wgmma g{element,        n,           get(0, 0),     get(2, 0), a_mn, b_mn, warp.exchange.in[8][0] != 0,
            get(6, 0) != 0, mine.groups, ++mine.issued, at,        {},   {},   {}};
    for (int l = 0; l < 32; ++l) {
      if (get(0, l) != g.a || get(2, l) != g.b || (warp.exchange.in[8][l] != 0) != g.accumulate) {
        complain(kDivergence, at, Site(), "wgmma operands differ within a warp");
      }
      g.accumulators[l] = reinterpret_cast<float*>(get(4, l));
      g.a_pointers[l] = reinterpret_cast<const uint32_t*>(get(6, l));
      if (g.a_in_registers) std::memcpy(g.a_registers[l], g.a_pointers[l], 16);
    }
    if (warp.number / 4 * 4 + 4 > this_block().warp_count) {
      complain(kProtocol, at, Site(), "wgmma from an incomplete warpgroup");
    }
    if (!mine.fenced) complain(kProtocol, at, Site(), "wgmma with no wgmma.fence since the last wait");
    if (Descriptor(g.a).base_offset || Descriptor(g.b).base_offset) {
      complain(kProtocol, at, Site(), "a base offset other than 0 is not emulated");
    }
    if ((g.b_mn && !Descriptor(g.b).swizzle) || (!g.a_in_registers && g.a_mn && !Descriptor(g.a).swizzle)) {
      complain(kProtocol, at, Site(), "an MN-major operand without swizzle is not emulated");
    }
    auto& held = mine.in_flight[g.accumulators[0]];
    if (held.empty()) {
      held.resize(32 * words);
      for (size_t l = 0; l < 32; ++l) {
        std::memcpy(&held[l * words], g.accumulators[l], words * 4);
        for (size_t i = 0; i < words; ++i) std::memcpy(g.accumulators[l] + i, &kInFlight, 4);
      }
    }
    mark_operands(warp.number, g);
    mine.products.push_back(g);
  });
}

inline void wgmma_fence(Site site) {
  meet(kWgmmaFence, site, "wgmma.fence", [](Warp&, Site) { this_warp_of_hopper().fenced = true; });
}
inline void wgmma_commit(Site site) {
  meet(kWgmmaCommit, site, "wgmma.commit_group", [](Warp&, Site) { ++this_warp_of_hopper().groups; });
}

// The product is complete: gives lanes their accumulators, if no later product is still to add to them.
inline void complete(int warp, const Wgmma& g, const std::vector<float*>& named, Site at) {
  WarpOfHopper& mine = this_warp_of_hopper();
  for (int l = 0; l < 32 && g.a_in_registers; ++l) {
    if (std::memcmp(g.a_registers[l], g.a_pointers[l], 16) == 0) continue;
    complain(kProtocol, at, g.site, "register operand A of the wgmma at %s was changed while in flight",
             place(g.site).c_str());
    break;
  }
  auto& held = mine.in_flight[g.accumulators[0]];
  compute(warp, g, held);
  for (const Wgmma& later : mine.products) {
    if (later.accumulators[0] == g.accumulators[0]) return;
  }
  // `named` are the pointers of the lane that runs this.
  if (std::find(named.begin(), named.end(), g.accumulators[this_thread().lane()]) == named.end()) {
    complain(kProtocol, at, g.site, "this wait completes an accumulator (wgmma at %s) that it does not name",
             place(g.site).c_str());
  }
  const auto words = static_cast<size_t>(g.n / 2);
  for (size_t l = 0; l < 32; ++l) {
    for (size_t i = 0; i < words; ++i) {
      if (std::memcmp(g.accumulators[l] + i, &kInFlight, 4) == 0) continue;
      complain(kProtocol, at, g.site, "accumulator written while its wgmma (%s) was in flight", place(g.site).c_str());
      break;
    }
    std::memcpy(g.accumulators[l], &held[l * words], words * 4);
  }
  mine.in_flight.erase(g.accumulators[0]);
}

inline void wgmma_wait(int newest, std::initializer_list<float*> named, Site site) {
  this_block().order.individual();
  const std::vector<float*> list(named);
  meet(kWgmmaWait, site, "wgmma.wait_group", [newest, &list](Warp& warp, Site at) {
    Block& block = this_block();
    WarpOfHopper& mine = this_warp_of_hopper();
    mine.fenced = false;
    while (!mine.products.empty() && mine.products.front().group < mine.groups - newest) {
      const Wgmma g = mine.products.front();
      mine.products.pop_front();
      complete(warp.number, g, list, at);
    }
    const auto done = mine.issued - static_cast<uint32_t>(mine.products.size());
    const int agent = block.thread_count + HopperState::kMbarriers + warp.number;
    for (int l = 0; l < 32; ++l) block.order.learn(warp.number * 32 + l, agent, done);
  });
}

}  // namespace packattn::emu
