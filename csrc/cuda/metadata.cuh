// Kernels of metadata.h. Two forms: one thread for each token, which finds its document by binary search; and scans, in
// at most two launches, where what a token gives depends on all before it.
#pragma once
#include <climits>
#include <cstdint>
#include <type_traits>

#include "../common/metadata.h"
#include "row_range.cuh"
#include "scan.cuh"

namespace packattn::cuda {

constexpr int kMetadataThreads = 256;

PACKATTN_DEVICE int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + static_cast<int64_t>(threadIdx.x);
}

PACKATTN_DEVICE int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// ---- scans over a token axis ----------------------------------------------------------------------------------------
//
// A Job says what is scanned:
//
//   using Value                                              see scan.cuh
//   int64_t count                                            length of the axis
//   Value at(int64_t t) const                                what token t contributes
//   void emit(int64_t t, const Value& before, const Value& own) const
//                                                            called once for every t, with what lies before it
//   void finish(int64_t n, int64_t threads, const Value& total) const
//                                                            called once by each of `threads` threads n = 0, 1, ...
//
// The axis is cut into one span for each block. If there is more than one, a first launch combines each span, and every
// block of the second one combines the spans before its own (there are at most as many as a block has threads).

constexpr int kScanItems = 8;  // of one thread, in a round
constexpr int kScanRound = kMetadataThreads * kScanItems;
constexpr int kMaxSpans = kMetadataThreads;

template <class Job>
constexpr int kScanShared = kBlockScanBytes<typename Job::Value>;

// Walks the calling block's span: calls visit(t, before, own) for every token. Returns everything up to its end,
// combined.
template <class Job, class Visit>
PACKATTN_DEVICE typename Job::Value scan_span(const Job& job, int64_t span, typename Job::Value carry,
                                              const Visit& visit) {
  using Value = typename Job::Value;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * span;
  const int64_t end = begin + span < job.count ? begin + span : job.count;
  for (int64_t round = begin; round < end; round += kScanRound) {
    const int64_t first = round + static_cast<int64_t>(threadIdx.x) * kScanItems;
    Value item[kScanItems];
    Value own = Value::identity();
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      item[k] = first + k < end ? job.at(first + k) : Value::identity();
      own = own.then(item[k]);
    }
    const Scanned<Value> scanned = block_scan(own, ptx::smem_base());
    Value before = carry.then(scanned.before);
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      if (first + k < end) visit(first + k, before, item[k]);
      before = before.then(item[k]);
    }
    carry = carry.then(scanned.total);
  }
  return carry;
}

template <class Job>
__global__ void __launch_bounds__(kMetadataThreads)
    combine_spans_kernel(Job job, int64_t span, typename Job::Value* spans) {
  using Value = typename Job::Value;
  const Value all = scan_span(job, span, Value::identity(), [](int64_t, const Value&, const Value&) {});
  if (threadIdx.x == 0) ptx::store_global(spans + blockIdx.x, all);
}

// 4 blocks on a multiprocessor are plenty; without the number the compiler spills registers to fit more.
template <class Job>
__global__ void __launch_bounds__(kMetadataThreads, 4)
    scan_kernel(Job job, int64_t span, const typename Job::Value* spans) {
  using Value = typename Job::Value;
  Value carry = Value::identity();
  Value total = Value::identity();
  if (gridDim.x > 1) {
    Value one = Value::identity();
    if (threadIdx.x < gridDim.x) one = ptx::load_global(spans + threadIdx.x);
    total = block_scan(one, ptx::smem_base()).total;
    carry = block_scan(threadIdx.x < blockIdx.x ? one : Value::identity(), ptx::smem_base()).total;
  }
  const Value end =
      scan_span(job, span, carry, [&](int64_t t, const Value& before, const Value& own) { job.emit(t, before, own); });
  if (gridDim.x == 1) total = end;
  job.finish(thread_number(), static_cast<int64_t>(gridDim.x) * blockDim.x, total);
}

// ---- cu_seqlens from lengths ----------------------------------------------------------------------------------------

struct SaturatingSum {
  int32_t value;  // not negative
  PACKATTN_DEVICE static SaturatingSum identity() { return {0}; }
  PACKATTN_DEVICE SaturatingSum then(const SaturatingSum& next) const {
    return {next.value > INT_MAX - value ? INT_MAX : value + next.value};
  }
};

template <typename Index>
struct OffsetsJob {
  using Value = SaturatingSum;
  const Index* lengths;
  int64_t count;
  int32_t* cu;  // [count + 1]

  PACKATTN_DEVICE Value at(int64_t n) const {
    return {static_cast<int32_t>(clamped(ptx::load_global(lengths + n), 0, INT_MAX))};
  }
  PACKATTN_DEVICE void emit(int64_t n, const Value& before, const Value&) const {
    ptx::store_global(cu + n, before.value);
  }
  PACKATTN_DEVICE void finish(int64_t n, int64_t, const Value& total) const {
    if (n == 0) ptx::store_global(cu + count, total.value);
  }
};

// ---- where documents start ------------------------------------------------------------------------------------------

// How many tokens are marked, and one past the last token that counts as part of a document.
struct Marks {
  int32_t count;
  int32_t last;
  PACKATTN_DEVICE static Marks identity() { return {0, 0}; }
  PACKATTN_DEVICE Marks then(const Marks& next) const {
    return {count + next.count, next.last > last ? next.last : last};
  }
};

// What `rows` rows of `columns` tokens say about token t and the one before.
template <typename Index>
struct Tokens {
  const Index* data;
  uint32_t columns;
  int32_t total;
  PACKATTN_DEVICE Index at(int64_t t) const { return ptx::load_global(data + t); }
  PACKATTN_DEVICE bool starts_row(int64_t t) const { return static_cast<uint32_t>(t) % columns == 0; }
};

// Segment ids: a document starts where the value changes and at every row.
template <typename Index>
struct SegmentRule {
  Tokens<Index> tokens;
  bool has_pad;
  int64_t pad_id;
  bool padding_is_an_entry;  // cu_seqlens has no gaps, so padding between documents is an entry like a document

  PACKATTN_DEVICE bool padding(Index value) const { return has_pad && static_cast<int64_t>(value) == pad_id; }
  PACKATTN_DEVICE bool in_document(int64_t t) const { return !padding(tokens.at(t)); }
  PACKATTN_DEVICE bool starts(int64_t t) const {
    const Index value = tokens.at(t);
    if (padding(value) && !padding_is_an_entry) return false;
    if (t == 0) return true;
    const Index before = tokens.at(t - 1);
    // A row's end does not cut padding: one gap between two documents is one entry.
    return value != before || (tokens.starts_row(t) && !padding(value));
  }
  PACKATTN_DEVICE bool ends(int64_t t) const {
    return in_document(t) && (t + 1 == tokens.total || tokens.starts_row(t + 1) || tokens.at(t) != tokens.at(t + 1));
  }
};

// Position ids: a document starts where they do not go on, or where they are 0, and at every row.
template <typename Index>
struct PositionRule {
  Tokens<Index> tokens;
  BoundaryRule rule;

  PACKATTN_DEVICE bool in_document(int64_t) const { return true; }
  PACKATTN_DEVICE bool starts(int64_t t) const {
    if (tokens.starts_row(t)) return true;
    const Index position = tokens.at(t);
    if (rule == BoundaryRule::zero) return position == 0;
    const Index before = tokens.at(t - 1);
    return position <= before || position - 1 != before;  // before + 1 might overflow
  }
};

// cu_seqlens: the starts in order, then the end of the last document.
template <class Rule>
struct CuSeqlensJob {
  using Value = Marks;
  Rule rule;
  int64_t count;
  int64_t max_segments;
  int32_t* cu;        // [max_segments + 1]
  int32_t* segments;  // [1] or nullptr

  PACKATTN_DEVICE Value at(int64_t t) const {
    return {rule.starts(t) ? 1 : 0, rule.in_document(t) ? static_cast<int32_t>(t + 1) : 0};
  }
  PACKATTN_DEVICE void emit(int64_t t, const Value& before, const Value& own) const {
    if (own.count > 0 && before.count <= max_segments) {
      ptx::store_global(cu + before.count, static_cast<int32_t>(t));
    }
  }
  PACKATTN_DEVICE void finish(int64_t n, int64_t threads, const Value& total) const {
    // Padding at the very end is marked, but its start is where the last document ends: no entry of its own.
    const int32_t trailing = total.last < count ? 1 : 0;
    if (n == 0 && segments != nullptr) ptx::store_global(segments, total.count - trailing);
    for (int64_t i = total.count + n; i <= max_segments; i += threads) ptx::store_global(cu + i, total.last);
  }
};

template <class Rule>
struct DocumentsJob {
  using Value = Marks;
  Rule rule;
  int64_t count;
  int64_t max_segments;
  int32_t* starts;    // [max_segments]
  int32_t* ends;      // [max_segments]
  int32_t* segments;  // [1] or nullptr

  PACKATTN_DEVICE Value at(int64_t t) const {
    return {rule.starts(t) ? 1 : 0, rule.in_document(t) ? static_cast<int32_t>(t + 1) : 0};
  }
  PACKATTN_DEVICE void emit(int64_t t, const Value& before, const Value& own) const {
    const bool starts_here = own.count > 0;
    const int32_t document = before.count - (starts_here ? 0 : 1);  // the one that token t is in, or the last before it
    if (document >= max_segments) return;
    if (starts_here) ptx::store_global(starts + document, static_cast<int32_t>(t));
    if (rule.ends(t)) ptx::store_global(ends + document, static_cast<int32_t>(t + 1));
  }
  PACKATTN_DEVICE void finish(int64_t n, int64_t threads, const Value& total) const {
    if (n == 0 && segments != nullptr) ptx::store_global(segments, total.count);
    for (int64_t i = total.count + n; i < max_segments; i += threads) {
      ptx::store_global(starts + i, total.last);
      ptx::store_global(ends + i, total.last);
    }
  }
};

// ---- the document of a token ----------------------------------------------------------------------------------------

// How many of the first `count` entries are at most `value`, if they are in order; some number in [0, count] if not.
template <typename Index>
PACKATTN_DEVICE int64_t count_at_most(const Index* entries, int64_t count, int64_t value) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<int64_t>(ptx::load_global(entries + middle)) <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename Index>
__global__ void __launch_bounds__(kMetadataThreads)
    position_ids_kernel(const Index* cu, int64_t count, int64_t total, int64_t* position_ids) {
  const int64_t t = thread_number();
  if (t >= total) return;
  const int64_t entry = count_at_most(cu, count, t) - 1;
  const int64_t start = clamped(ptx::load_global(cu + (entry < 0 ? 0 : entry)), 0, total);
  ptx::store_global(position_ids + t, t - start);
}

template <typename Index>
__global__ void __launch_bounds__(kMetadataThreads)
    segment_ids_kernel(const Index* cu, int64_t count, int64_t total, int32_t* segment_ids) {
  const int64_t t = thread_number();
  if (t >= total) return;
  const int64_t entry = count_at_most(cu, count, t) - 1;
  const bool inside = entry + 1 < count;  // the last entry is where the last document ends
  ptx::store_global(segment_ids + t, static_cast<int32_t>(inside ? entry : -1));
}

template <typename Index>
__global__ void __launch_bounds__(kMetadataThreads)
    document_ranges_kernel(DocumentPairs<Index> documents, int64_t total_q, DocumentRanges out) {
  const int64_t t = thread_number();
  if (t >= total_q) return;
  // Of documents that start at one row, the last: the others have no rows.
  const int64_t n = count_at_most(documents.starts_q, documents.count, t) - 1;
  int64_t begin = 0, end = 0, diagonal = 0;
  bool inside = false;
  if (n >= 0) {
    const int64_t end_q = clamped(ptx::load_global(documents.ends_q + n), 0, INT_MAX);
    end = clamped(ptx::load_global(documents.ends_k + n), 0, INT_MAX);
    inside = t < end_q;
    begin = inside ? clamped(ptx::load_global(documents.starts_k + n), 0, INT_MAX) : end;
    // Bottom-right aligned; equal to start_k + (t - start_q) + (len_k - len_q).
    diagonal = inside ? end - (end_q - t) : end;
  }
  ptx::store_global(out.begin + t, static_cast<int32_t>(begin));
  ptx::store_global(out.end + t, static_cast<int32_t>(end));
  ptx::store_global(out.diagonal + t, static_cast<int32_t>(diagonal));
  ptx::store_global(out.segment_ids + t, static_cast<int32_t>(inside ? n : -1));
}

// ---- key ranges -----------------------------------------------------------------------------------------------------

struct KeyRangesTask {
  const int32_t* begin;       // [rows]
  const int32_t* end;         // [rows]
  const int32_t* diagonal;    // [rows] or nullptr: the row's own number
  const int32_t* prefix_end;  // [rows] or nullptr
  int64_t rows;
  int64_t left;    // -1: no limit
  int64_t right;   // -1: no limit
  uint32_t chunk;  // 0: none
  int32_t* key_begin;
  int32_t* key_end;
};

// The same arithmetic as packattn::cpu::key_ranges, whose comments say why.
__global__ void __launch_bounds__(kMetadataThreads) key_ranges_kernel(KeyRangesTask task) {
  const int64_t i = thread_number();
  if (i >= task.rows) return;
  const int64_t first = ptx::load_global(task.begin + i);
  const int64_t last = ptx::load_global(task.end + i);
  const int64_t center = task.diagonal != nullptr ? int64_t{ptx::load_global(task.diagonal + i)} : i;
  const auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto larger = [](int64_t a, int64_t b) { return a < b ? b : a; };
  int64_t low = first;
  int64_t high = last;
  if (task.left >= 0) low = larger(low, center - task.left);
  if (task.right >= 0) high = smaller(high, center + task.right + 1);
  if (task.chunk > 0 && center >= first) {
    low = larger(low, first + int64_t{static_cast<uint32_t>(center - first) / task.chunk} * task.chunk);
  }
  if (task.prefix_end != nullptr) high = larger(high, smaller(ptx::load_global(task.prefix_end + i), last));
  low = smaller(low, last);
  high = smaller(larger(high, low), last);
  ptx::store_global(task.key_begin + i, static_cast<int32_t>(low));
  ptx::store_global(task.key_end + i, static_cast<int32_t>(high));
}

// ---- query ranges ---------------------------------------------------------------------------------------------------
//
// Rows that see nothing may hold anything, so they are left out first. Over the others both ends are in order, and each
// key finds the first row that ends after it and the last that begins at or before it.

struct SeeingRowsJob {
  using Value = Marks;
  const int32_t* key_begin;  // [count]
  const int32_t* key_end;    // [count]
  int64_t count;
  int32_t total_k;
  int32_t* rows;  // [count], written up to *seeing
  int32_t* seeing;

  PACKATTN_DEVICE bool sees(int64_t i) const {
    return !RowRange::clamped(ptx::load_global(key_begin + i), ptx::load_global(key_end + i), total_k).empty();
  }
  PACKATTN_DEVICE Value at(int64_t i) const { return {sees(i) ? 1 : 0, 0}; }
  PACKATTN_DEVICE void emit(int64_t i, const Value& before, const Value& own) const {
    if (own.count > 0) ptx::store_global(rows + before.count, static_cast<int32_t>(i));
  }
  PACKATTN_DEVICE void finish(int64_t n, int64_t, const Value& total) const {
    if (n == 0) ptx::store_global(seeing, total.count);
  }
};

// How many of the rows have ends[row] <= value; they are in order.
PACKATTN_DEVICE int32_t rows_at_most(const int32_t* rows, int32_t count, const int32_t* ends, int64_t value) {
  int32_t low = 0;
  int32_t high = count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (ptx::load_global(ends + ptx::load_global(rows + middle)) <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kMetadataThreads)
    query_ranges_kernel(SeeingRowsJob job, int32_t* query_begin, int32_t* query_end) {
  const int64_t j = thread_number();
  if (j >= job.total_k) return;
  const int32_t seeing = ptx::load_global(job.seeing);
  const int32_t first = rows_at_most(job.rows, seeing, job.key_end, j);
  const int32_t past = rows_at_most(job.rows, seeing, job.key_begin, j);
  const int32_t begin = first < seeing ? ptx::load_global(job.rows + first) : static_cast<int32_t>(job.count);
  const int32_t end = past > 0 ? ptx::load_global(job.rows + past - 1) + 1 : 0;
  ptx::store_global(query_begin + j, begin);
  ptx::store_global(query_end + j, end > begin ? end : begin);  // a key that nobody sees may lie between two ranges
}

}  // namespace packattn::cuda
