#include "attention_plan.h"

#include <algorithm>
#include <string>

#include "../common/serves.h"
#include "refuse.h"

namespace packattn::cpu {
namespace {

// Positions are kept as int32, and a tile may look this far past the end.
constexpr int64_t kMaxTokens = INT32_MAX - 1024;
// Multiply-adds: below the first, the heads of a row block are one item; a grab is worth at least the second.
constexpr int64_t kSmallItem = 100'000, kGrab = 1'000'000;
// A grab is at most this part of a worker's share of what is left.
constexpr int64_t kGuided = 4;

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::bfloat16: return "bfloat16";
    case DType::float16: return "float16";
    default: return "an unknown dtype";
  }
}

void check_sizes(const AttentionForwardParams& p) {
  for (const std::string& reason : cpu_refusals(name_of(p.dtype), p.head_dim, p.head_dim_v)) refuse(reason);
  if (p.heads_q < 1 || p.heads_k < 1 || p.heads_q % p.heads_k != 0) {
    refuse("heads_q must be a multiple of heads_k, got ", p.heads_q, " query heads and ", p.heads_k, " key heads");
  }
  const auto tokens = [](const char* name, int64_t n) {
    if (n < 0 || n > kMaxTokens) refuse(name, " must be from 0 to ", kMaxTokens, ", got ", n);
  };
  tokens("total_q", p.total_q);
  tokens("total_k", p.total_k);
}

// Adds [begin, end) to ranges, in pieces that can be filled by different workers.
void add_range(std::vector<Range>& ranges, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 512;
  for (; begin < end; begin += kPiece) {
    ranges.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(std::min(begin + kPiece, end))});
  }
}

int64_t row_cost(const AttentionForwardParams& p) { return (p.head_dim + p.head_dim_v) / 2; }

void finish(Schedule& schedule) {
  const auto longer = [](const Item& x, const Item& y) { return x.cost > y.cost; };
  // Stable: the tiles of a shared segment stay together and in order, as they all carry the same cost here.
  if (!std::is_sorted(schedule.items.begin(), schedule.items.end(), longer)) {
    std::stable_sort(schedule.items.begin(), schedule.items.end(), longer);
  }
}

// Items that nobody waits for are bundled into grabs that get smaller towards the end (guided self-scheduling,
// Polychronopoulos and Kuck 1987): inside a grab a worker knows what comes next and can prefetch it.
template <class Cost>
void make_grabs(Schedule& schedule, int workers, Cost cost) {
  int64_t left = 0;
  for (const Item& item : schedule.items) left += cost(item);
  int64_t gathered = 0, wanted = 0;
  bool turns = false;
  for (size_t i = 0; i < schedule.items.size(); i++) {
    const Item& item = schedule.items[i];
    if (gathered >= wanted || turns != (item.turns >= 0)) {
      schedule.grabs.push_back(static_cast<int64_t>(i));
      turns = item.turns >= 0;
      wanted = turns ? kGrab : std::max(kGrab, left / (kGuided * workers));
      gathered = 0;
    }
    gathered += cost(item);
    left -= cost(item);
  }
  schedule.grabs.push_back(static_cast<int64_t>(schedule.items.size()));
}

}  // namespace

Plan make_plan(const AttentionForwardParams& p) {
  check_sizes(p);
  KeyRangeCheck check(p.total_k);
  Plan plan;
  int64_t last = -1;     // the last row that sees something
  int64_t last_key = 0;  // end of the keys seen so far
  for (int64_t i = 0; i < p.total_q; i++) {
    const int64_t begin = p.key_begin[i], end = p.key_end[i];
    if (begin >= end) continue;
    check.row(i, begin, end);
    const int32_t row = static_cast<int32_t>(i);
    // Ends do not decrease, so last_key is also the running maximum: a later row of the segment may still see
    // earlier keys after rows that see nothing.
    const bool new_segment = last < 0 || begin >= last_key;
    if (new_segment) {
      const int32_t run = static_cast<int32_t>(plan.runs.size());
      plan.segments.push_back({static_cast<int32_t>(begin), 0, run, run, 0});
      plan.pairs.push_back(0);
      add_range(plan.unseen_keys, last_key, begin);
    }
    Segment& segment = plan.segments.back();
    if (new_segment || last != i - 1) {
      plan.runs.push_back({row, row, 0, 0});
      segment.run1++;
    }
    add_range(plan.empty_rows, last + 1, i);
    plan.runs.back().q1 = row + 1;
    segment.k1 = static_cast<int32_t>(end);
    plan.pairs.back() += end - begin;
    last = i;
    last_key = end;
  }
  add_range(plan.empty_rows, last + 1, p.total_q);
  add_range(plan.unseen_keys, last_key, p.total_k);
  for (Segment& segment : plan.segments) {
    for (int32_t r = segment.run0; r < segment.run1; r++) {
      Run& run = plan.runs[r];
      const int32_t rows = run.q1 - run.q0, blocks = ceil_div(rows, backward_rows(p));
      run.block_rows = std::min(round_up(ceil_div(rows, blocks), 6), backward_rows(p));
      run.block0 = segment.blocks;
      segment.blocks += ceil_div(rows, run.block_rows);
    }
  }
  return plan;
}

Schedule forward_schedule(const AttentionForwardParams& p, const Plan& plan, int workers) {
  Schedule schedule;
  const int32_t group = p.heads_q / p.heads_k, capacity = forward_rows(p);
  const int32_t block = std::max(6, capacity / group / 6 * 6);  // query rows when the group's heads are stacked
  for (int32_t s = 0; s < static_cast<int32_t>(plan.segments.size()); s++) {
    if (is_direct(plan.segments[s], plan.runs.data())) {
      const Run& run = plan.runs[plan.segments[s].run0];
      const int64_t cost = (plan.pairs[s] + 16 * (run.q1 - run.q0)) * p.heads_q * row_cost(p);
      schedule.items.push_back({s, plan.segments[s].run0, run.q0, run.q1, 0, p.heads_k, -1, cost});
      continue;
    }
    for (int32_t x = plan.segments[s].run0; x < plan.segments[s].run1; x++) {
      const Run& run = plan.runs[x];
      const int32_t rows = run.q1 - run.q0;
      const int32_t step = std::min(round_up(ceil_div(rows, ceil_div(rows, block)), 6), block);
      for (int32_t a = run.q0; a < run.q1; a += step) {
        const int32_t b = std::min(a + step, run.q1);
        const int64_t keys = p.key_end[b - 1] - p.key_begin[a];
        const int64_t cost = static_cast<int64_t>(b - a) * group * (keys + 32) * row_cost(p);
        if (cost < kSmallItem) {
          schedule.items.push_back({s, x, a, b, 0, p.heads_k, -1, cost * p.heads_k});
        } else {
          for (int32_t h = 0; h < p.heads_k; h++) schedule.items.push_back({s, x, a, b, h, h + 1, -1, cost});
        }
      }
    }
  }
  finish(schedule);
  make_grabs(schedule, workers, [](const Item& item) { return item.cost; });
  return schedule;
}

Schedule backward_schedule(const AttentionForwardParams& p, const Plan& plan, int workers) {
  Schedule schedule;
  const int32_t group = p.heads_q / p.heads_k, tile = key_tile(p);
  int64_t total = 0;
  for (const int64_t pairs : plan.pairs) total += pairs * p.heads_k;
  for (int32_t s = 0; s < static_cast<int32_t>(plan.segments.size()); s++) {
    const Segment& segment = plan.segments[s];
    const int32_t tiles = ceil_div(segment.k1 - segment.k0, tile);
    const int64_t rows = plan.runs[segment.run1 - 1].q1 - plan.runs[segment.run0].q0;
    const int64_t cost = (plan.pairs[s] + 32 * rows) * group * row_cost(p) * 5 / 2;
    // Shared or not changes no bit, so it may depend on the other documents and on the workers.
    const bool share = workers > 1 && tiles > 1 && plan.pairs[s] > total / (8 * workers);
    if (tiles > 1) {
      schedule.accumulators += p.heads_k;
      schedule.accumulator = std::max(schedule.accumulator, rows * group * padded_dim(p.head_dim));
    }
    if (share) {
      for (int32_t h = 0; h < p.heads_k; h++) {
        for (int32_t t = tiles - 1; t >= 0; t--) {
          schedule.items.push_back({s, 0, t, t + 1, h, h + 1, schedule.turns, cost});
        }
      }
      schedule.shared.push_back(s);
      schedule.turns += static_cast<int64_t>(segment.blocks) * p.heads_q;
    } else if (cost < kSmallItem || is_direct(segment, plan.runs.data())) {
      schedule.items.push_back({s, 0, 0, tiles, 0, p.heads_k, -1, cost * p.heads_k});
    } else {
      for (int32_t h = 0; h < p.heads_k; h++) schedule.items.push_back({s, 0, 0, tiles, h, h + 1, -1, cost});
    }
  }
  finish(schedule);
  make_grabs(schedule, workers, [&](const Item& item) {
    const Segment& segment = plan.segments[item.segment];
    return item.turns < 0 ? item.cost : item.cost / ceil_div(segment.k1 - segment.k0, tile);
  });
  return schedule;
}

}  // namespace packattn::cpu
