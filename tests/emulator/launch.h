// Runs the blocks of a grid, one after the other, and CUDA's built-in variables.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "block.h"
#include "sm90_state.h"

namespace packattn::emu {

inline void complain(Kind kind, Site site, Site other, const char* format, ...) {
  Report& r = report();
  ++r.count[kind];
  Block& block = this_block();
  auto& entry = r.entries[{kind, place(site), place(other)}];
  if (entry.count++ == 0) {
    char message[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    const dim3 i = block.index;
    entry.text = place(site) + (site.line() ? ", " : "") + "block (" + std::to_string(i.x) + "," + std::to_string(i.y) +
                 "," + std::to_string(i.z) + "): " + message;
  }
  if (r.total() < config().report_cap) return;
  block.abandoned = true;
  if (block.current) block.abandon();
}

inline void Block::thread_entry() {
  Block& block = this_block();
  Thread* const me = block.current;
  me->fiber.arrived(&block.scheduler);
  block.body();
  me->state = State::done;
  block.warps[static_cast<size_t>(me->warp())].ready &= ~(1u << me->lane());
  block.run_instead(me, block.pick(), true);
  std::abort();
}

inline void Block::prepare(dim3 grid_size, dim3 block_size, size_t shared_bytes, int resident_blocks) {
  if (shared_bytes > config().shared_memory) {
    throw std::invalid_argument("emulator: " + std::to_string(shared_bytes) + " bytes of shared memory asked, " +
                                std::to_string(config().shared_memory) + " is the most a block has");
  }
  const size_t count = static_cast<size_t>(block_size.x) * block_size.y * block_size.z;
  if (count % 32 || count > 1024 || count == 0) {
    throw std::invalid_argument("emulator: " + std::to_string(count) +
                                " threads in a block; it must be a multiple of 32 up to 1024");
  }
  grid = grid_size;
  size = block_size;
  shared_bytes_ = shared_bytes;
  thread_count = static_cast<int>(count);
  warp_count = thread_count / 32;
  resident = resident_blocks;
  threads.resize(count);
  warps.resize(count / 32);
  stacks_.reserve(thread_count);
  for (int t = 0; t < thread_count; ++t) {
    // Stacks are a whole number of pages apart. Without a shift, their hot ends would share a few sets of the cache.
    const size_t shift = static_cast<size_t>(t) * 1088 % 4096 / 64 * 64;
    threads[static_cast<size_t>(t)].fiber.stack = stacks_[t];
    threads[static_cast<size_t>(t)].fiber.stack_bytes = StackPool::kStack - shift;
  }
  scheduler.stack = nullptr;  // the caller's: another with every launch, perhaps
}

inline void Block::run(uint32_t block_number) {
  number = block_number;
  index = dim3{number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  ++report().counters.blocks;
  random_state = (config().seed * 0x9E3779B97F4A7C15ull ^ (number + 1) * 0xBF58476D1CE4E5B9ull) | 1;
  shared.reset(shared_bytes_, warp_count);
  order.reset(thread_count);
  at_barrier = 0;
  for (NamedBarrier& barrier : named_barriers) barrier.arrived = 0;
  abandoned = false;
  current = nullptr;
  for (int w = 0; w < warp_count; ++w) {
    Warp& warp = warps[static_cast<size_t>(w)];
    warp.number = w;
    warp.arrived = warp.ready = warp.at_named_barrier = 0;
  }
  for (int t = 0; t < thread_count; ++t) {
    Thread& thread = threads[static_cast<size_t>(t)];
    const auto n = static_cast<unsigned>(t);
    thread.number = t;
    thread.index = dim3{n % size.x, n / size.x % size.y, n / size.x / size.y};
    thread.copies.clear();
    thread.copies_landed = 0;
    thread.groups = thread.proxy_fences = 0;
    thread.fiber.start(&Block::thread_entry);
    make_ready(thread);
  }
  HopperState sm90(*this);
  hopper = &sm90;
  while (!abandoned) {
    if (Thread* next = pick()) {
      run_instead(nullptr, next);
    } else if (!sm90.land_one_copy()) {
      break;
    }
  }
  if (!abandoned) finish();
  hopper = nullptr;
}

inline void Block::finish() {
  std::map<std::string, int> where;
  int stuck = 0;
  for (const Thread& t : threads) {
    if (t.state == State::done) continue;
    ++stuck;
    ++where[std::string(t.waits_in) + " at " + place(t.waits_at)];
  }
  if (stuck) {
    std::string all;
    for (const auto& [at, count] : where) all += (all.empty() ? "" : "; ") + std::to_string(count) + " in " + at;
    complain(kDeadlock, Site(), Site(), "%d of %d threads never finish: %s", stuck, thread_count, all.c_str());
  }
  for (const Thread& t : threads) {
    if (t.copies_landed == t.copies.size()) continue;
    complain(kLeftover, t.copies[t.copies_landed].site, Site(), "thread %d exits with %zu cp.async not waited for",
             t.number, t.copies.size() - t.copies_landed);
  }
  for (int i = 0; i < 16; ++i) {
    if (!named_barriers[i].arrived) continue;
    complain(kLeftover, named_barriers[i].site, Site(), "named barrier %d is left with %d of %d arrivals", i,
             named_barriers[i].arrived, named_barriers[i].threads);
  }
  hopper->check_end();
}

// Runs body() as every thread of every block of the grid, blocks one after the other. What it finds is in report().
// resident: blocks of it that a multiprocessor holds at a time, which share its registers.
// Throws std::invalid_argument for a launch that a GPU would refuse.
inline void launch(dim3 grid, dim3 block_size, size_t shared_bytes, std::function<void()> body, int resident = 1) {
  static Block block;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  block.prepare(grid, block_size, shared_bytes, resident);
  block.body = std::move(body);
  global_memory().begin_launch();
  std::vector<uint32_t> numbers(static_cast<size_t>(grid.x) * grid.y * grid.z);
  std::iota(numbers.begin(), numbers.end(), 0u);
  if (config().policy == 1) std::reverse(numbers.begin(), numbers.end());
  if (config().policy == 2) {
    block.random_state = config().seed * 0x9E3779B97F4A7C15ull | 1;
    for (size_t i = numbers.size(); i > 1; --i) std::swap(numbers[i - 1], numbers[block.random() % i]);
  }
  running_block = &block;
  for (const uint32_t number : numbers) {
    block.run(number);
    if (block.abandoned) break;
  }
  running_block = nullptr;
}

}  // namespace packattn::emu

#define threadIdx (::packattn::emu::this_thread().index)
#define blockIdx (::packattn::emu::this_block().index)
#define blockDim (::packattn::emu::this_block().size)
#define gridDim (::packattn::emu::this_block().grid)
