// Loads, stores and asynchronous copies of one thread.
#pragma once
#include "launch.h"

namespace packattn::emu {

// ---- shared memory
inline void load_shared(uint32_t address, void* value, uint32_t bytes, Site site) {
  Block& block = this_block();
  const int thread = this_thread().number;
  if (!block.shared.accessible(thread, address, bytes, bytes, site, "ld.shared")) {
    std::memset(value, 0xFF, bytes);
    return;
  }
  block.shared.on_read(block.order, thread, address, bytes, site);
  std::memcpy(value, block.shared.at(address), bytes);
}
inline void store_shared(uint32_t address, const void* value, uint32_t bytes, Site site) {
  Block& block = this_block();
  const Thread& me = this_thread();
  if (!block.shared.accessible(me.number, address, bytes, bytes, site, "st.shared")) return;
  block.shared.on_write(block.order, me.number, address, bytes, site, SharedMemory::Content::valid, me.number,
                        me.proxy_fences);
  std::memcpy(block.shared.at(address), value, bytes);
}

// ---- global memory
inline GlobalMemory::Access global_access(Site site) {
  const Block& block = this_block();
  return {block.number, this_thread().number, &block.order, site};
}
inline bool global_accessible(const void* p, size_t bytes, Site site, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) {
    complain(kMisaligned, site, Site(), "thread %d: %s of %zu bytes at %p", this_thread().number, what, bytes, p);
    return false;
  }
  if (!global_memory().inside(p, bytes)) {
    complain(kOutOfBounds, site, Site(), "thread %d: %s of %zu bytes at %p, outside every known buffer",
             this_thread().number, what, bytes, p);
    return false;
  }
  return true;
}
// Whether the access may be made; complains if not.
inline bool load_global(const void* p, size_t bytes, Site site) {
  if (!global_accessible(p, bytes, site, "a load")) return false;
  global_memory().on_read(p, bytes, global_access(site));
  return true;
}
inline bool store_global(const void* p, size_t bytes, Site site) {
  if (!global_accessible(p, bytes, site, "a store")) return false;
  global_memory().on_write(p, bytes, global_access(site));
  return true;
}

// ---- asynchronous copies: the destination is poisoned when one is issued, the data lands in the wait that covers it
inline void async_copy(uint32_t destination, const void* source, uint8_t bytes, bool valid, Site site) {
  Block& block = this_block();
  Thread& me = this_thread();
  ++report().counters.async_copies;
  if (reinterpret_cast<uintptr_t>(source) % bytes) {
    complain(kMisaligned, site, Site(), "thread %d: cp.async source %p is not %d-byte aligned", me.number, source,
             bytes);
  }
  if (!global_memory().inside(source, bytes)) {
    complain(kOutOfBounds, site, Site(), "thread %d: cp.async %s %d bytes at %p, outside every known buffer", me.number,
             valid ? "reads" : "(not valid) names", bytes, source);
    valid = false;
  }
  if (valid) global_memory().on_read(source, bytes, global_access(site));
  if (!block.shared.accessible(me.number, destination, bytes, bytes, site, "cp.async")) return;
  block.shared.on_write(block.order, me.number, destination, bytes, site, SharedMemory::Content::pending, me.number,
                        me.proxy_fences);
  std::memset(block.shared.at(destination), 0xFF, bytes);
  me.copies.push_back({destination, source, bytes, static_cast<uint8_t>(valid ? bytes : 0), me.groups, site});
}
inline void async_commit() { ++this_thread().groups; }
inline void async_wait(int newest) {
  Block& block = this_block();
  Thread& me = this_thread();
  while (me.copies_landed < me.copies.size()) {
    const AsyncCopy& copy = me.copies[me.copies_landed];
    if (static_cast<int64_t>(copy.group) >= static_cast<int64_t>(me.groups) - newest) break;
    uint8_t* to = block.shared.at(copy.destination);
    std::memset(to, 0, copy.bytes);
    if (copy.from_source) std::memcpy(to, copy.source, copy.from_source);
    block.shared.on_landing(copy.destination, copy.bytes, me.number, block.order.now(me.number));
    ++me.copies_landed;
  }
  if (me.copies_landed == me.copies.size()) {
    me.copies.clear();
    me.copies_landed = 0;
  }
}

}  // namespace packattn::emu
