// How the work of one attention call is divided. Compiled once, for every instruction set.
#pragma once
#include <cstdint>
#include <vector>

#include "attention_kernels.h"

namespace packattn::cpu {

struct Range {
  int32_t begin, end;
};

struct Plan {
  std::vector<Segment> segments;
  std::vector<Run> runs;
  std::vector<int64_t> pairs;      // of each segment: (row, key) pairs that see each other
  std::vector<Range> empty_rows;   // rows that see nothing: their results are filled in
  std::vector<Range> unseen_keys;  // keys that nobody sees: their gradients are zeros
};

// Checks sizes, strides, dtype and key ranges; throws std::invalid_argument. Divides the rows.
Plan make_plan(const AttentionForwardParams& params);

// Items in the order in which they start: the longest first, so that a long document does not finish last. A grab
// is what a worker takes at a time: the items [grabs[g], grabs[g + 1]).
struct Schedule {
  std::vector<Item> items;
  std::vector<int64_t> grabs;
  std::vector<int32_t> shared;  // backward: segments whose tiles several workers take in turns
  int64_t turns = 0;            // backward: turn counters in all
  int64_t accumulators = 0;     // backward: (segment, kv head) pairs whose dquery is a sum over several tiles
  int64_t accumulator = 0;      // backward: floats that the largest of those sums needs

  int64_t size() const { return static_cast<int64_t>(grabs.size()) - 1; }
};
Schedule forward_schedule(const AttentionForwardParams& params, const Plan& plan, int workers);
Schedule backward_schedule(const AttentionForwardParams& params, const Plan& plan, int workers);

}  // namespace packattn::cpu
