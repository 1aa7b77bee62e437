// Shared memory and its shadow: for every 4 bytes, who wrote them last, who has read them since, and whether an
// asynchronous copy may still be writing them. Every access is held against bounds, alignment and happens-before, so a
// race is found whatever the schedule was.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "order.h"
#include "report.h"

namespace packattn::emu {

// Records a finding of the running block. Returns, unless that was one too many: then the block is abandoned.
void complain(Kind kind, Site site, Site other, const char* format, ...) __attribute__((format(printf, 4, 5)));

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
    warps_ = warps;
    std::memset(bytes_, 0xFF, bytes);
    const size_t words = (bytes + 3) / 4;
    words_.assign(words, Word{});
    readers_.assign(words * static_cast<size_t>(warps), Readers{});
    agent_readers_.clear();
    fences_.clear();
  }
  uint8_t* at(uint32_t address) { return bytes_ + address; }
  size_t size() const { return size_; }

  // Blocks with mbarriers only: reads by agents (see Order) and generic writes that the asynchronous proxy reads.
  void track_agents() {
    if (!fences_.empty()) return;
    agent_readers_.assign(readers_.size(), AgentReader{});
    fences_.assign(words_.size(), 0);
  }

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
    const Time now = order.now(thread);
    const int warp = thread / 32;
    const uint32_t lane = 1u << thread % 32;
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
      check_readable(order, thread, i, site);
      Readers& r = readers_[static_cast<size_t>(i) * static_cast<size_t>(warps_) + static_cast<size_t>(warp)];
      r.lanes = r.time == now ? r.lanes | lane : lane;
      r.time = now;
      r.site = site;
    }
  }
  // A read by the asynchronous proxy, on behalf of `thread`; done when `agent` is known to have reached `time`.
  void on_agent_read(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site, int agent, Time time,
                     const uint32_t* fences_of_threads) {
    if (!config().race_check) return;
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
      check_readable(order, thread, i, site);
      check_fenced(order, i, site, fences_of_threads);
      agent_readers_[static_cast<size_t>(i) * static_cast<size_t>(warps_) + static_cast<size_t>(thread / 32)] =
          AgentReader{time, static_cast<uint16_t>(agent), site};
    }
  }
  void check_fenced(const Order& order, uint32_t word, Site site, const uint32_t* fences_of_threads) const {
    const Word& w = words_[word];
    if (w.content == Content::valid && w.writer < order.threads() && fences_of_threads[w.writer] <= fences_[word]) {
      complain(kProxy, site, w.site,
               "the asynchronous proxy reads shared byte %u, written by thread %d at %s:%u with no fence.proxy.async "
               "after it",
               word * 4, w.writer, file_name(w.site), w.site.line());
    }
  }

  // writer: the thread, or the agent on whose behalf it writes. fences: the thread's proxy fences so far.
  void on_write(const Order& order, int thread, uint32_t address, uint32_t bytes, Site site, Content content,
                int writer, uint32_t fences = 0) {
    if (!config().race_check) return;
    const Time now = order.now(thread);
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
      Word& w = words_[i];
      if (w.content == Content::pending) {
        complain_pending(thread, "writes", i, site);
      } else if (w.content == Content::valid && !order.knows(thread, w.writer, w.time)) {
        complain(kRace, site, w.site,
                 "thread %d overwrites shared byte %u, written by thread %d at %s:%u with no barrier between", thread,
                 i * 4, w.writer, file_name(w.site), w.site.line());
      }
      Readers* readers = &readers_[static_cast<size_t>(i) * static_cast<size_t>(warps_)];
      for (int q = 0; q < warps_; ++q) {
        if (!order.knows_lanes(thread, q, readers[q].lanes, readers[q].time)) {
          complain(kRace, site, readers[q].site,
                   "thread %d overwrites shared byte %u, read by warp %d (lanes %08x) at %s:%u with no barrier between",
                   thread, i * 4, q, readers[q].lanes, file_name(readers[q].site), readers[q].site.line());
        }
        readers[q].time = 0;
        readers[q].lanes = 0;
      }
      if (!agent_readers_.empty()) check_agents(order, thread, i, site);
      w = Word{now, static_cast<uint16_t>(writer), content, site};
      if (!fences_.empty()) fences_[i] = fences;
    }
  }
  // An asynchronous write is done.
  void on_landing(uint32_t address, uint32_t bytes, int writer, Time time) {
    if (!config().race_check) return;
    for (uint32_t i = address / 4; i < (address + bytes + 3) / 4; ++i) {
      words_[i].time = time;
      words_[i].writer = static_cast<uint16_t>(writer);
      words_[i].content = Content::valid;
    }
  }

 private:
  struct Word {
    Time time = 0;
    uint16_t writer = 0;
    Content content = Content::uninitialised;
    Site site;
  };
  struct Readers {  // of one warp
    Time time = 0;
    uint32_t lanes = 0;
    Site site;  // of the last
  };
  struct AgentReader {
    Time time = 0;
    uint16_t agent = 0;
    Site site;
  };

  void complain_pending(int thread, const char* does, uint32_t word, Site site) const {
    const Word& w = words_[word];
    complain(kAsync, site, w.site,
             "thread %d %s shared byte %u while the asynchronous copy issued at %s:%u (thread %d) may be in flight",
             thread, does, word * 4, file_name(w.site), w.site.line(), w.writer);
  }
  void check_readable(const Order& order, int thread, uint32_t word, Site site) const {
    const Word& w = words_[word];
    if (w.content == Content::valid) {
      if (order.knows(thread, w.writer, w.time)) return;
      complain(kRace, site, w.site,
               "thread %d reads shared byte %u, written by thread %d at %s:%u with no barrier between", thread,
               word * 4, w.writer, file_name(w.site), w.site.line());
    } else if (w.content == Content::pending) {
      complain_pending(thread, "reads", word, site);
    } else {
      complain(kUninitialised, site, Site(), "thread %d reads shared byte %u, never written in this block", thread,
               word * 4);
    }
  }
  void check_agents(const Order& order, int thread, uint32_t word, Site site) {
    AgentReader* readers = &agent_readers_[static_cast<size_t>(word) * static_cast<size_t>(warps_)];
    for (int q = 0; q < warps_; ++q) {
      if (readers[q].time && !order.knows(thread, readers[q].agent, readers[q].time)) {
        complain(kRace, site, readers[q].site,
                 "thread %d overwrites shared byte %u, which a wgmma of warp %d at %s:%u may still read", thread,
                 word * 4, q, file_name(readers[q].site), readers[q].site.line());
      }
      readers[q].time = 0;
    }
  }

  uint8_t* bytes_ = nullptr;
  size_t allocated_ = 0, size_ = 0;
  int warps_ = 0;
  std::vector<Word> words_;
  std::vector<Readers> readers_;            // [words, warps]
  std::vector<AgentReader> agent_readers_;  // [words, warps] or empty
  std::vector<uint32_t> fences_;            // [words] or empty: the writer's proxy fences before the write
};

}  // namespace packattn::emu
