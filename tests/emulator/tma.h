// Bulk tensor copies (TMA) from global to shared memory, with swizzle and zero fill.
#pragma once
#include "sm90_barriers.h"

namespace packattn::emu {

// What cuTensorMapEncodeTiled is given. Dimension 0 is the contiguous one.
struct TensorMap {
  const char* base = nullptr;
  int rank = 0, element_bytes = 2;
  int swizzle = 0;                        // span in bytes: 0, 32, 64, 128
  uint64_t size[5] = {}, stride[5] = {};  // elements; bytes (of dimension 0: element_bytes)
  uint32_t box[5] = {};                   // elements
};

// The address that stands for `address` under a swizzle: the index of the 16-byte chunk XOR the index of the 128-byte
// row.
inline uint32_t swizzled(uint32_t address, int span) {
  if (span == 128) return address ^ (address >> 3 & 0x70);
  if (span == 64) return address ^ (address >> 3 & 0x30);
  if (span == 32) return address ^ (address >> 3 & 0x10);
  return address;
}

inline void tensor_copy_lands(const TensorMap& map, const std::vector<int>& at, uint32_t destination, int barrier,
                              Site site) {
  Block& block = this_block();
  const uint32_t inner = map.box[0] * static_cast<uint32_t>(map.element_bytes);
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  const auto element = static_cast<size_t>(map.element_bytes);
  for (uint32_t r = 0; r < rows; ++r) {
    uint64_t offset = 0;
    bool inside = true;
    uint32_t rest = r;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t x = at[static_cast<size_t>(i)] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      inside = inside && x >= 0 && x < static_cast<int64_t>(map.size[i]);
      offset += static_cast<uint64_t>(x) * map.stride[i];
    }
    for (uint32_t e = 0; e < map.box[0]; ++e) {
      const int64_t x = at[0] + static_cast<int64_t>(e);
      uint8_t* to =
          block.shared.at(swizzled(destination + r * inner + e * static_cast<uint32_t>(element), map.swizzle));
      if (!inside || x < 0 || x >= static_cast<int64_t>(map.size[0])) {
        std::memset(to, 0, element);
        continue;
      }
      const char* from = map.base + offset + static_cast<size_t>(x) * element;
      if (global_memory().inside(from, element)) {
        std::memcpy(to, from, element);
      } else {
        complain(kOutOfBounds, site, Site(),
                 "bulk copy reads %p, outside every known buffer: sizes or strides of its map",
                 static_cast<const void*>(from));
      }
    }
  }
  Mbarrier& m = mbarrier(barrier);
  const int agent = block.thread_count + barrier;
  block.shared.on_landing(destination, rows * inner, agent, m.phase + 1);
  m.arrived[static_cast<size_t>(agent)] = m.phase + 1;
  m.pending_bytes -= rows * inner;
  end_phase_if_complete(m);
}

inline void tensor_copy(uint32_t destination, const TensorMap* map_of_thread, uint32_t barrier_address,
                        std::vector<int> at, Site site) {
  Block& block = this_block();
  const Thread& me = this_thread();
  const int barrier = mbarrier_at(barrier_address, site);
  if (barrier < 0) return;
  block.shared.on_read(block.order, me.number, barrier_address, 8, site);
  block.shared.check_fenced(block.order, barrier_address, 8, site,
                            [&block](int thread) { return block.threads[static_cast<size_t>(thread)].proxy_fences; });
  ++report().counters.tma;
  const TensorMap map = *map_of_thread;  // the thread, and its parameters, may be gone when the copy lands
  const uint32_t inner = map.box[0] * static_cast<uint32_t>(map.element_bytes);
  uint32_t bytes = inner;
  if (static_cast<int>(at.size()) != map.rank) {
    complain(kProtocol, site, Site(), "copy of rank %zu with a map of rank %d", at.size(), map.rank);
    return;
  }
  if (map.swizzle && inner > static_cast<uint32_t>(map.swizzle)) {
    complain(kProtocol, site, Site(), "box row of %u bytes exceeds the swizzle span %d", inner, map.swizzle);
  }
  if (inner % 16 || reinterpret_cast<uintptr_t>(map.base) % 16) {
    complain(kMisaligned, site, Site(), "bulk copy: base and box row must be multiples of 16 bytes");
  }
  for (int i = 0; i < map.rank; ++i) {
    if (i > 0) bytes *= map.box[i];
    if ((i > 0 && map.stride[i] % 16) || map.box[i] > 256) {
      complain(kProtocol, site, Site(), "bulk copy: a stride that is no multiple of 16, or a box over 256");
    }
  }
  const uint32_t alignment = map.swizzle == 128 ? 1024 : 128;
  if (!block.shared.accessible(me.number, destination, bytes, alignment, site, "bulk tensor copy")) return;
  block.shared.on_write(block.order, me.number, destination, bytes, site, SharedMemory::Content::pending,
                        block.thread_count + barrier, me.proxy_fences);
  std::memset(block.shared.at(destination), 0xFF, bytes);
  this_hopper().copies.push_back({[=] { tensor_copy_lands(map, at, destination, barrier, site); }});
}

}  // namespace packattn::emu
