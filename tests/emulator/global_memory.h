// Global memory: the buffers that kernels may touch, and a shadow of them. Where any buffer is registered, every access
// through load_global, store_global and asynchronous copies has to lie inside one, AddressSanitizer or not, and is held
// against all others of the same launch: blocks are not ordered at all, the threads of one by its barriers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "order.h"
#include "report.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define PACKATTN_EMULATOR_ASAN 1
#else
#define PACKATTN_EMULATOR_ASAN 0
#endif

namespace packattn::emu {

class GlobalMemory {
 public:
  struct Access {
    uint32_t block;  // of the launch
    int thread;
    const Order* order;
    Site site;
  };

  void add(const void* data, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    forget_recent();
    buffers_[begin] = std::make_unique<Buffer>(Buffer{begin, begin + bytes, 0, kCoarsest, {}});
  }
  void remove(const void* data) {
    forget_recent();
    buffers_.erase(reinterpret_cast<uintptr_t>(data));
  }
  // What was done in the launch before is done.
  void begin_launch() { ++launch_; }

  bool inside(const void* data, size_t bytes) {
#if PACKATTN_EMULATOR_ASAN
    if (__asan_region_is_poisoned(const_cast<void*>(data), bytes)) return false;
#endif
    return buffers_.empty() || find(reinterpret_cast<uintptr_t>(data), bytes);
  }

  void on_read(const void* data, size_t bytes, const Access& access) {
    for_each_cell(data, bytes, [&](Cell& cell, uintptr_t at) {
      if (unordered(cell.write, access)) complain_about(cell.write, cell.site, at, access, "reads", "written");
      if (cell.read.time && cell.read.block != access.block) cell.read_by_others = true;
      cell.read = {access.block, access.order->now(access.thread), static_cast<uint16_t>(access.thread)};
    });
  }
  void on_write(const void* data, size_t bytes, const Access& access) {
    for_each_cell(data, bytes, [&](Cell& cell, uintptr_t at) {
      if (unordered(cell.write, access)) complain_about(cell.write, cell.site, at, access, "overwrites", "written");
      if (cell.read_by_others || unordered(cell.read, access)) {
        complain_about(cell.read, Site(), at, access, "overwrites", "read");
      }
      cell.write = {access.block, access.order->now(access.thread), static_cast<uint16_t>(access.thread)};
      cell.site = access.site;
    });
  }

 private:
  struct Stamp {
    uint32_t block;
    Time time;  // 0: never in this launch
    uint16_t thread;
  };
  struct Cell {
    Stamp write{}, read{};        // the last
    bool read_by_others = false;  // than the block in `read`
    Site site;                    // of the write
  };
  static constexpr size_t kCoarsest = 16;
  struct Buffer {
    uintptr_t begin, end;
    uint64_t launch;  // that the cells are of
    size_t grain;     // bytes of a cell: kCoarsest, less from the first smaller access of a launch on
    std::vector<Cell> cells;
  };

  Buffer* find(uintptr_t address, size_t bytes) {
    Buffer*& recent = recent_[address / 4096 % kRecent];
    if (recent && recent->begin <= address && address + bytes <= recent->end) return recent;
    auto after = buffers_.upper_bound(address);
    if (after == buffers_.begin()) return nullptr;
    Buffer* buffer = (--after)->second.get();
    if (address + bytes > buffer->end) return nullptr;
    return recent = buffer;
  }
  void forget_recent() { std::memset(recent_, 0, sizeof recent_); }

  template <class Fn>
  void for_each_cell(const void* data, size_t bytes, Fn&& fn) {
    if (!config().race_check || buffers_.empty()) return;
    const auto address = reinterpret_cast<uintptr_t>(data);
    Buffer* buffer = find(address, bytes);
    if (!buffer) return;
    if (buffer->launch != launch_) {
      buffer->launch = launch_;
      buffer->grain = kCoarsest;
      buffer->cells.assign((buffer->end - buffer->begin + kCoarsest - 1) / kCoarsest, Cell{});
    }
    const uintptr_t offset = address - buffer->begin;
    while ((offset | bytes) % buffer->grain) halve(*buffer);
    const size_t grain = buffer->grain;
    for (size_t i = offset / grain; i < (offset + bytes) / grain; ++i) fn(buffer->cells[i], buffer->begin + i * grain);
  }
  static void halve(Buffer& buffer) {
    std::vector<Cell> halves;
    halves.reserve(buffer.cells.size() * 2);
    for (const Cell& cell : buffer.cells) halves.insert(halves.end(), 2, cell);
    buffer.cells = std::move(halves);
    buffer.grain /= 2;
  }
  static bool unordered(const Stamp& before, const Access& now) {
    if (before.time == 0) return false;
    return before.block != now.block || !now.order->knows(now.thread, before.thread, before.time);
  }
  static void complain_about(const Stamp& other, Site other_site, uintptr_t at, const Access& access, const char* does,
                             const char* done) {
    const std::string where = other_site.line() ? " at " + place(other_site) : "";
    complain(kGlobalRace, access.site, other_site,
             "thread %d %s global memory at %p, %s by thread %d of block %u%s in the same launch, with nothing between",
             access.thread, does, reinterpret_cast<void*>(at), done, other.thread, other.block, where.c_str());
  }

  std::map<uintptr_t, std::unique_ptr<Buffer>> buffers_;
  static constexpr size_t kRecent = 64;
  Buffer* recent_[kRecent] = {};  // by page
  uint64_t launch_ = 0;
};

inline GlobalMemory the_global_memory;
inline GlobalMemory& global_memory() { return the_global_memory; }
inline void register_buffer(const void* data, size_t bytes) { global_memory().add(data, bytes); }
inline void forget_buffer(const void* data) { global_memory().remove(data); }

// n elements on the heap, registered; not one byte more for AddressSanitizer. Filled with 0xFF: NaN in every float
// type.
template <class T>
struct Buffer {
  T* p = nullptr;
  size_t n = 0;

  explicit Buffer(size_t count) : n(count) {
    p = static_cast<T*>(std::aligned_alloc(256, allocated()));
#if PACKATTN_EMULATOR_ASAN
    ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(p) + bytes(), allocated() - bytes());
#endif
    std::memset(static_cast<void*>(p), 0xFF, bytes());
    register_buffer(p, bytes());
  }
  ~Buffer() {
    forget_buffer(p);
#if PACKATTN_EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(p, allocated());
#endif
    std::free(p);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T& operator[](size_t i) { return p[i]; }
  const T& operator[](size_t i) const { return p[i]; }
  size_t bytes() const { return n * sizeof(T); }
  size_t allocated() const { return (bytes() / 256 + 1) * 256; }
};

}  // namespace packattn::emu
