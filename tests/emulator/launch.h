// Runs the blocks of a grid, one after the other, and CUDA's built-in variables.
#pragma once
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "block.h"
#include "sm90_state.h"

namespace packattn::emu {

inline void complain_with(Kind kind, Site site, Site other, const char* format, va_list arguments) {
  Block& block = this_block();
  char message[400];
  vsnprintf(message, sizeof message, format, arguments);
  Report& r = report();
  ++r.count[kind];
  const auto place = [](Site s) {
    return s.line() ? std::string(file_name(s)) + ":" + std::to_string(s.line()) : std::string();
  };
  auto& entry = r.entries[{kind, place(site), place(other)}];
  if (entry.count++ == 0) {
    const std::string where = site.line() ? place(site) + ", " : "";
    entry.text = where + "block (" + std::to_string(block.index.x) + "," + std::to_string(block.index.y) + "," +
                 std::to_string(block.index.z) + "): " + message;
  }
  if (r.total() >= config().report_cap && !block.abandoned) {
    block.abandoned = true;
    if (block.current) block.abandon();
  }
}
inline void complain(Kind kind, Site site, Site other, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  complain_with(kind, site, other, format, arguments);
  va_end(arguments);
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

inline void Block::prepare(dim3 grid_size, dim3 block_size, size_t shared_bytes, StackPool& stacks) {
  grid = grid_size;
  size = block_size;
  thread_count = static_cast<int>(size.x * size.y * size.z);
  if (thread_count % 32 || thread_count > 1024 || thread_count == 0) {
    std::fprintf(stderr, "emulator: %d threads in a block; it must be a multiple of 32 up to 1024\n", thread_count);
    std::abort();
  }
  warp_count = thread_count / 32;
  threads.resize(static_cast<size_t>(thread_count));
  warps.resize(static_cast<size_t>(warp_count));
  stacks.reserve(thread_count);
  for (int t = 0; t < thread_count; ++t) {
    // Stacks are a whole number of pages apart. Their hot ends would share the few cache sets of one page offset.
    const size_t shift = static_cast<size_t>(t) * 1088 % 4096 / 64 * 64;
    threads[static_cast<size_t>(t)].fiber.stack = stacks[t];
    threads[static_cast<size_t>(t)].fiber.stack_bytes = StackPool::kStack - shift;
  }
  shared_bytes_ = shared_bytes;
}

inline void Block::run(dim3 block_index) {
  index = block_index;
  ++report().counters.blocks;
  random_state = config().seed * 0x9E3779B97F4A7C15ull + index.x * 7919u + index.y * 104729u + index.z * 1299709u + 1;
  shared.reset(shared_bytes_, warp_count);
  order.reset(thread_count);
  at_barrier = 0;
  abandoned = false;
  current = nullptr;
  hopper = nullptr;
  for (Warp& w : warps) w = Warp{};
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
  size_t stuck = 0;
  for (const Thread& thread : threads) stuck += thread.state != State::done;
  if (!abandoned) finish(stuck);
  for (Thread& thread : threads) thread.state = State::done;
  hopper = nullptr;
}

inline void Block::finish(size_t stuck) {
  if (stuck) {
    std::map<std::string, int> where;
    for (const Thread& t : threads) {
      if (t.state == State::done) continue;
      ++where[std::string(t.waits_in) + " at " + file_name(t.waits_at) + ":" + std::to_string(t.waits_at.line())];
    }
    std::string all;
    for (const auto& [place, count] : where) all += (all.empty() ? "" : "; ") + std::to_string(count) + " in " + place;
    complain(kDeadlock, Site(), Site(), "%zu of %d threads never finish: %s", stuck, thread_count, all.c_str());
  }
  for (const Thread& t : threads) {
    if (t.copies_landed == t.copies.size()) continue;
    complain(kLeftover, t.copies[t.copies_landed].site, Site(), "thread %d exits with %zu cp.async not waited for",
             t.number, t.copies.size() - t.copies_landed);
  }
  hopper->check_end();
}

// Runs body() as every thread of every block of the grid. What it finds is in report().
template <class Body>
void launch(dim3 grid, dim3 block_size, size_t shared_bytes, Body&& body) {
  if (shared_bytes > config().shared_memory) {
    std::fprintf(stderr, "emulator: %zu bytes of shared memory asked, %zu is the most a block has\n", shared_bytes,
                 config().shared_memory);
    std::abort();
  }
  static StackPool stacks;
  static Block block;
  block.prepare(grid, block_size, shared_bytes, stacks);
  block.body = [&body] { body(); };
  running_block = &block;
  std::vector<uint64_t> order_of_blocks(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  std::iota(order_of_blocks.begin(), order_of_blocks.end(), uint64_t{0});
  if (config().policy == 1) std::reverse(order_of_blocks.begin(), order_of_blocks.end());
  if (config().policy == 2) {
    block.random_state = config().seed * 0x9E3779B97F4A7C15ull + 1;
    for (size_t i = order_of_blocks.size(); i > 1; --i) {
      std::swap(order_of_blocks[i - 1], order_of_blocks[block.random() % i]);
    }
  }
  for (const uint64_t i : order_of_blocks) {
    block.run(dim3{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                   static_cast<unsigned>(i / grid.x / grid.y)});
    if (block.abandoned) break;
  }
  running_block = nullptr;
}

}  // namespace packattn::emu

#define threadIdx (::packattn::emu::this_thread().index)
#define blockIdx (::packattn::emu::this_block().index)
#define blockDim (::packattn::emu::this_block().size)
#define gridDim (::packattn::emu::this_block().grid)
