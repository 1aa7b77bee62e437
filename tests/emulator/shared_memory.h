// Shared memory and its shadow: who wrote each word last, who has read it since, and whether an asynchronous copy may
// still be writing it. Every access is held against bounds, alignment and happens-before, so a race is found whatever
// the schedule was.
//
// Most accesses are 16 aligned bytes, so the shadow has one cell per 16 bytes and splits it into one per word only
// where a smaller access needs it.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "order.h"
#include "report.h"

namespace packattn::emu {

class SharedMemory {
 public:
  enum class Content : uint8_t { uninitialised, valid, pending };

  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { std::free(bytes_); }

  // Fresh for a block: filled with 0xFF (every float type reads NaN), nothing written.
  void reset(size_t bytes, int warps) {
    if (bytes > allocated_) {
      std::free(bytes_);
      allocated_ = (bytes + 1023) / 1024 * 1024;
      bytes_ = static_cast<uint8_t*>(std::aligned_alloc(1024, allocated_));
    }
    size_ = bytes;
    warps_ = static_cast<size_t>(warps);
    if (bytes > 0) std::memset(bytes_, 0xFF, bytes);
    const size_t chunks = (bytes + 15) / 16;
    chunks_.assign(chunks, Cell{});
    split_.assign(chunks, 0);
    agent_readers_.clear();
    // Of no meaning until a cell says so; never cleared.
    if (words_.size() < 4 * chunks) words_.resize(4 * chunks);
    if (chunk_readers_.size() < chunks * warps_) chunk_readers_.resize(chunks * warps_);
    if (word_readers_.size() < 4 * chunks * warps_) word_readers_.resize(4 * chunks * warps_);
  }
  uint8_t* at(uint32_t address) { return bytes_ + address; }
  size_t size() const { return size_; }

  // Whether [address, address + bytes) may be touched at all; complains if not.
  bool accessible(int thread, uint32_t address, uint32_t bytes, uint32_t alignment, Site site, const char* what) const {
    if (address % alignment) {
      complain(kMisaligned, site, Site(), "thread %d: %s at shared address %u needs %u-byte alignment", thread, what,
               address, alignment);
      return false;
    }
    if (static_cast<size_t>(address) + bytes > size_) {
      complain(kOutOfBounds, site, Site(), "thread %d: %s touches shared bytes %u..%u of %zu", thread, what, address,
               address + bytes - 1, size_);
      return false;
    }
    return true;
  }

  void on_read(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site) {
    if (!config().race_check) return;
    for_each_cell(address, bytes, false, [&](Cell& cell, Readers* readers, uint32_t at) {
      check_readable(order, thread, cell, at, site);
      const Time now = order.now(thread);
      const uint32_t warp = 1u << thread / 32, lane = 1u << thread % 32;
      Readers& mine = readers[thread / 32];
      mine.lanes = (cell.read_by & warp) && mine.time == now ? mine.lanes | lane : lane;
      mine.time = now;
      mine.site = site;
      cell.read_by |= warp;
    });
  }

  // writer: the thread, or the agent on whose behalf it writes. fences: the thread's proxy fences so far.
  void on_write(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site, Content content,
                int writer, uint32_t fences) {
    if (!config().race_check) return;
    for_each_cell(address, bytes, true, [&](Cell& cell, Readers* readers, uint32_t at) {
      check_writable(order, thread, cell, readers, at, site);
      cell = Cell{order.now(thread), static_cast<uint16_t>(writer), content, 0, fences, site};
    });
    if (!agent_readers_.empty()) check_agents(order, thread, address, bytes, site);
  }

  // An asynchronous write is done.
  void on_landing(uint32_t address, uint32_t bytes, int writer, Time time) {
    if (!config().race_check) return;
    for_each_cell(address, bytes, false, [&](Cell& cell, Readers*, uint32_t) {
      cell.time = time;
      cell.writer = static_cast<uint16_t>(writer);
      cell.content = Content::valid;
    });
  }

  // A read of whole 16-byte chunks by the asynchronous proxy on behalf of `thread`, over when `agent` (see Order) is
  // known to have reached `time`. fences_of(thread): its proxy fences so far.
  template <class FencesOf>
  void on_agent_read(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site, int agent, Time time,
                     FencesOf&& fences_of) {
    if (!config().race_check) return;
    if (agent_readers_.empty()) agent_readers_.assign(chunks_.size() * warps_, AgentReader{});
    for_each_cell(address, bytes, false, [&](Cell& cell, Readers*, uint32_t at) {
      check_readable(order, thread, cell, at, site);
      check_fenced(order, cell, at, site, fences_of);
    });
    for (size_t c = address / 16; c < (address + bytes + 15) / 16; ++c) {
      agent_readers_[c * warps_ + static_cast<size_t>(thread / 32)] = {time, static_cast<uint16_t>(agent), site};
    }
  }
  template <class FencesOf>
  void check_fenced(const Order& order, uint32_t address, uint32_t bytes, Site site, FencesOf&& fences_of) {
    if (!config().race_check) return;
    for_each_cell(address, bytes, false,
                  [&](Cell& cell, Readers*, uint32_t at) { check_fenced(order, cell, at, site, fences_of); });
  }

 private:
  struct Cell {
    Time time = 0;  // of the last write
    uint16_t writer = 0;
    Content content = Content::uninitialised;
    uint32_t read_by = 0;  // warps, since the last write; the entries of their readers count
    uint32_t fences = 0;   // of the writer, before the write
    Site site;
  };
  struct Readers {  // of one warp, at its latest time. Those of earlier times are ordered before it by what advanced
                    // it.
    Time time;
    uint32_t lanes;
    Site site;  // of the last
  };
  struct AgentReader {
    Time time = 0;
    uint16_t agent = 0;
    Site site;
  };

  // fn(cell, readers of the cell by warp, address) for all cells of the range. overwrites: whole chunks need not stay
  // split.
  template <class Fn>
  void for_each_cell(uint32_t address, uint32_t bytes, bool overwrites, Fn&& fn) {
    for (uint32_t end = address + bytes; address < end;) {
      const size_t c = address / 16;
      const bool whole = address % 16 == 0 && end - address >= 16;
      if (whole && !split_[c]) {
        fn(chunks_[c], &chunk_readers_[c * warps_], address);
        address += 16;
        continue;
      }
      if (!split_[c]) split(c);
      const uint32_t stop = whole ? address + 16 : std::min(end, static_cast<uint32_t>(c + 1) * 16);
      for (; address < stop; address = address / 4 * 4 + 4) {
        const size_t w = address / 4;
        fn(words_[w], &word_readers_[w * warps_], address);
      }
      if (whole && overwrites) {
        chunks_[c] = words_[4 * c];
        split_[c] = 0;
      }
    }
  }
  void split(size_t c) {
    split_[c] = 1;
    for (size_t w = 4 * c; w < 4 * c + 4; ++w) {
      words_[w] = chunks_[c];
      for (uint32_t warps = chunks_[c].read_by; warps; warps &= warps - 1) {
        const auto q = static_cast<size_t>(__builtin_ctz(warps));
        word_readers_[w * warps_ + q] = chunk_readers_[c * warps_ + q];
      }
    }
  }

  void check_readable(const Order& order, int thread, const Cell& cell, uint32_t at, Site site) const {
    if (cell.content == Content::valid) {
      if (order.knows(thread, cell.writer, cell.time)) return;
      complain(kRace, site, cell.site,
               "thread %d reads shared byte %u, written by thread %d at %s:%u with no barrier between", thread, at,
               cell.writer, file_name(cell.site), cell.site.line());
    } else if (cell.content == Content::pending) {
      complain_pending(thread, "reads", cell, at, site);
    } else {
      complain(kUninitialised, site, Site(), "thread %d reads shared byte %u, never written in this block", thread, at);
    }
  }
  void check_writable(const Order& order, int thread, const Cell& cell, const Readers* readers, uint32_t at,
                      Site site) const {
    if (cell.content == Content::pending) {
      complain_pending(thread, "writes", cell, at, site);
    } else if (cell.content == Content::valid && !order.knows(thread, cell.writer, cell.time)) {
      complain(kRace, site, cell.site,
               "thread %d overwrites shared byte %u, written by thread %d at %s:%u with no barrier between", thread, at,
               cell.writer, file_name(cell.site), cell.site.line());
    }
    for (uint32_t warps = cell.read_by; warps; warps &= warps - 1) {
      const int q = __builtin_ctz(warps);
      const Readers& r = readers[q];
      if (order.knows_lanes(thread, q, r.lanes, r.time)) continue;
      complain(kRace, site, r.site,
               "thread %d overwrites shared byte %u, read by warp %d (lanes %08x) at %s:%u with no barrier between",
               thread, at, q, r.lanes, file_name(r.site), r.site.line());
    }
  }
  void complain_pending(int thread, const char* does, const Cell& cell, uint32_t at, Site site) const {
    complain(kAsync, site, cell.site,
             "thread %d %s shared byte %u while the asynchronous copy issued at %s:%u (thread %d) may be in flight",
             thread, does, at, file_name(cell.site), cell.site.line(), cell.writer);
  }
  template <class FencesOf>
  void check_fenced(const Order& order, const Cell& cell, uint32_t at, Site site, FencesOf&& fences_of) const {
    if (cell.content != Content::valid || cell.writer >= order.threads()) return;
    if (fences_of(cell.writer) > cell.fences) return;
    complain(
        kProxy, site, cell.site,
        "the asynchronous proxy reads shared byte %u, written by thread %d at %s:%u with no fence.proxy.async after",
        at, cell.writer, file_name(cell.site), cell.site.line());
  }
  void check_agents(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site) {
    for (size_t c = address / 16; c < (address + bytes + 15) / 16; ++c) {
      for (size_t q = 0; q < warps_; ++q) {
        AgentReader& r = agent_readers_[c * warps_ + q];
        if (r.time && !order.knows(thread, r.agent, r.time)) {
          complain(kRace, site, r.site,
                   "thread %d overwrites shared bytes %zu.., which the wgmma of warp %zu at %s:%u may still read",
                   thread, c * 16, q, file_name(r.site), r.site.line());
        }
        r.time = 0;
      }
    }
  }

  uint8_t* bytes_ = nullptr;
  size_t allocated_ = 0, size_ = 0, warps_ = 0;
  std::vector<Cell> chunks_, words_;
  std::vector<uint8_t> split_;                         // by chunk: its words' cells count
  std::vector<Readers> chunk_readers_, word_readers_;  // [cells, warps]
  std::vector<AgentReader> agent_readers_;             // [chunks, warps] or empty
};

}  // namespace packattn::emu
