// A block of threads: its fibers, who runs next, and what it has to complain about.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda_language.h"
#include "fiber.h"
#include "global_memory.h"
#include "order.h"
#include "report.h"
#include "shared_memory.h"

namespace packattn::emu {

enum class State : uint8_t { ready, at_warp, at_block, at_mbarrier, at_named_barrier, done };

// One cp.async that has been issued and not yet waited for.
struct AsyncCopy {
  uint32_t destination;
  const void* source;
  uint8_t bytes;        // 4 or 16
  uint8_t from_source;  // the first so many come from the source, the rest are zero
  uint32_t group;
  Site site;
};

struct Thread {
  Fiber fiber;
  dim3 index;
  int number = 0;  // in the block
  State state = State::done;
  const char* waits_in = "";
  Site waits_at;
  uint32_t mbarrier = 0, parity = 0;  // what it waits for
  int named_barrier = 0;
  std::vector<AsyncCopy> copies;  // oldest first
  size_t copies_landed = 0;       // leading entries of copies that are done
  uint32_t groups = 0;            // committed
  uint32_t proxy_fences = 0;

  int warp() const { return number / 32; }
  int lane() const { return number % 32; }
};

// Registers that the lanes of a warp bring to a meeting and take away from it, lane by lane.
struct Exchange {
  alignas(64) uint32_t in[10][32];
  alignas(64) uint32_t out[4][32];
};

struct Warp {
  uint32_t arrived = 0, ready = 0;  // lanes: in the meeting under way; that may run
  uint32_t at_named_barrier = 0;
  int number = 0, operation = 0;
  Site site;
  Exchange exchange;
};

// bar.sync and bar.arrive with a number.
struct NamedBarrier {
  int threads = 0, arrived = 0;  // that are to meet in this phase; that have come
  uint32_t phase = 0, warps = 0, waiting_warps = 0;
  Site site;                   // of the first
  Order::Knowledge knowledge;  // of those that have come
};

class HopperState;  // mbarriers, bulk copies, wgmma: sm90.h

struct Block {
  dim3 index, size, grid;
  uint32_t number = 0;  // in the grid
  int thread_count = 0, warp_count = 0;
  int resident = 1;  // blocks that share the registers of a multiprocessor
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Thread* current = nullptr;  // nullptr: the scheduler
  Order order;
  SharedMemory shared;
  int at_barrier = 0;  // threads in __syncthreads
  Site barrier_site;
  NamedBarrier named_barriers[16];
  uint64_t random_state = 1;
  std::function<void()> body;
  Fiber scheduler;
  bool abandoned = false;  // the cap on reports was reached
  HopperState* hopper = nullptr;

  uint32_t random() {  // xorshift
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<uint32_t>(random_state >> 16);
  }

  void make_ready(Thread& thread) {
    thread.state = State::ready;
    warps[static_cast<size_t>(thread.warp())].ready |= 1u << thread.lane();
  }
  // The current thread cannot go on: runs others until it is made ready.
  void wait(State state, const char* in, Site at) {
    Thread* const me = current;
    me->state = state;
    me->waits_in = in;
    me->waits_at = at;
    Warp& warp = warps[static_cast<size_t>(me->warp())];
    warp.ready &= ~(1u << me->lane());
    Thread* const next = pick();
    if (next != me) run_instead(me, next);
  }
  // Leaves the running thread and never comes back to any.
  [[noreturn]] void abandon() {
    run_instead(current, nullptr, true);
    std::abort();
  }
  void run(uint32_t block_number);
  void prepare(dim3 grid_size, dim3 block_size, size_t shared_bytes, int resident_blocks);

 private:
  // The next thread to run, by the policy; nullptr if all wait.
  Thread* pick() {
    const int policy = config().policy;
    int start = current ? current->warp() : 0;
    if (policy == 2) start = static_cast<int>(random() % static_cast<uint32_t>(warp_count));
    for (int k = 0; k < warp_count; ++k) {
      int w = policy == 1 ? start - k : start + k;
      w += w < 0 ? warp_count : w >= warp_count ? -warp_count : 0;
      const uint32_t ready = warps[static_cast<size_t>(w)].ready;
      if (!ready) continue;
      int lane = __builtin_ctz(ready);
      if (policy == 1) lane = 31 - __builtin_clz(ready);
      if (policy == 2) {
        const uint32_t r = random() & 31, upper = ready >> r;
        if (upper) lane = static_cast<int>(r) + __builtin_ctz(upper);
      }
      return &threads[static_cast<size_t>(w * 32 + lane)];
    }
    return nullptr;
  }
  void run_instead(Thread* from, Thread* to, bool done = false) {
    ++report().counters.switches;
    current = to;
    (from ? from->fiber : scheduler).switch_to(to ? to->fiber : scheduler, done);
  }
  void finish();
  static void thread_entry();

  size_t shared_bytes_ = 0;
  StackPool stacks_;
};

// Constant-initialised and of this module alone, so that threadIdx costs one load and no call.
#define PACKATTN_EMULATOR_TLS constinit inline thread_local __attribute__((tls_model("initial-exec")))
PACKATTN_EMULATOR_TLS Block* running_block = nullptr;
#undef PACKATTN_EMULATOR_TLS

inline Block& this_block() { return *running_block; }
inline Thread& this_thread() { return *running_block->current; }

}  // namespace packattn::emu
