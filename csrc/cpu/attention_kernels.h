// What the scheduler (attention.cpp, compiled once) and the kernels (compiled per instruction set) share.
// Plain data only: see element.h for why the kernels use no templates of the standard library.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../common/params.h"

namespace packattn::cpu {

// Consecutive rows that all see something. key_begin and key_end are nondecreasing inside it.
struct Run {
  int32_t q0, q1;      // rows [q0, q1)
  int32_t block_rows;  // backward: its row blocks start at q0 + i * block_rows
  int32_t block0;      // backward: number of its first block in the segment
};

// Runs whose key ranges chain together: one document, usually. Segments share no key and no row, and every tile
// boundary is counted from the segment's own first key and first row. That is what makes a document's bits
// independent of its neighbours.
struct Segment {
  int32_t k0, k1;      // keys [k0, k1): all that its rows see
  int32_t run0, run1;  // runs [run0, run1)
  int32_t blocks;      // backward: row blocks of all its runs
};

// Forward: rows [a, b) of one run, kv heads [h0, h1). Backward: key tiles [a, b) of one segment, highest first.
struct Item {
  int32_t segment;
  int32_t run;  // forward only
  int32_t a, b;
  int32_t h0, h1;
  int64_t turns;  // backward: index of the segment's turn counters, -1 if this item has the segment to itself
  int64_t cost;   // multiply-adds, roughly
};

// What may be prefetched while the current work is done: where the next piece starts. kv_head < 0: nothing.
struct Next {
  const Item* item = nullptr;
  int32_t kv_head = -1;
};

struct ForwardContext {
  const AttentionForwardParams* params;
  const Segment* segments;
  const Run* runs;
  // out is so large that it leaves the caches before anybody reads it, and it is aligned: stores go past the caches,
  // which saves reading what they overwrite.
  bool stream_out;
};

struct BackwardContext {
  const AttentionBackwardParams* params;
  const Segment* segments;
  const Run* runs;
  float* delta;    // [Hq, Tq]: rowsum(dout * out) - dlse, written before it is read, block by block
  int32_t* turns;  // [kv head, head in its group, row block] of each segment that several workers share
  void (*wait_for_turn)(const int32_t* turn, int32_t tile);
  bool stream_dquery, stream_dkey, stream_dvalue;  // as stream_out, where a value is stored once and for all
};

// One instruction set. Functions take the call's dtype from params.
struct Kernels {
  const char* isa;
  // floats of scratch that a worker needs
  size_t (*forward_scratch)(const AttentionForwardParams&);
  void (*forward)(const ForwardContext&, const Item&, const Item* next, float* scratch);

  size_t (*backward_scratch)(const AttentionBackwardParams&);
  // delta of rows [r0, r1), all heads
  void (*delta)(const BackwardContext&, int32_t r0, int32_t r1);
  // All heads of a document for which is_direct() holds.
  void (*backward_direct)(const BackwardContext&, const Item&, const Item* next, float* scratch);
  // The tiles of one item and kv head. accumulator: float [G, rows, Dp] for dquery, of the segment's rows from the
  // first to the last, for 16-bit types and segments of several tiles.
  void (*backward)(const BackwardContext&, const Item&, int32_t kv_head, float* accumulator, Next next, float* scratch);
  // sum over the runs' rows of -exp(sink - lse) * delta for one query head
  double (*sink_gradient)(const BackwardContext&, const Run* runs, int64_t count, int32_t head);
};

namespace portable {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

// Documents of at most so many rows and keys take a path of their own (attention_direct.h), all heads in one item.
static constexpr int32_t kDirect = 16;
static constexpr bool is_direct(const Segment& s, const Run* runs) {
  return s.run1 - s.run0 == 1 && s.k1 - s.k0 <= kDirect && runs[s.run0].q1 - runs[s.run0].q0 <= kDirect;
}

// Keys per tile. Sums are made tile by tile, so bits depend on it, and it may depend on the head dimensions alone.
static constexpr int32_t key_tile(const AttentionForwardParams& p) {
  return p.head_dim <= 64 && p.head_dim_v <= 64 ? 128 : 64;
}
// Stacked query rows per forward block. Changes no bits.
static constexpr int32_t forward_rows(const AttentionForwardParams& p) {
  const int32_t d = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  return d <= 128 ? 192 : d <= 256 ? 96 : 48;
}
// Query rows per backward block, before a run's rows are divided evenly. dkey and dvalue are summed block by block, so
// their bits depend on it, and it may depend on the head dimensions alone.
static constexpr int32_t backward_rows(const AttentionForwardParams& p) {
  return p.head_dim <= 128 && p.head_dim_v <= 128 ? 96 : 48;
}
// Documents of one key tile and one block of rows: their gradients need no sums across tiles
// (attention_backward_single.h).
static constexpr bool is_single(const AttentionForwardParams& p, const Segment& s, const Run* runs) {
  return s.run1 - s.run0 == 1 && s.k1 - s.k0 <= key_tile(p) && runs[s.run0].q1 - runs[s.run0].q0 <= backward_rows(p);
}
static constexpr int32_t round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }
static constexpr int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }
static constexpr int32_t padded_dim(int32_t d) { return round_up(d, 16); }

}  // namespace packattn::cpu
