#include "metadata.h"

#include <algorithm>
#include <limits>

#include "refuse.h"

namespace packattn::cpu {
namespace {

constexpr int64_t kMaxOffset = std::numeric_limits<int32_t>::max();

template <typename Index>
int64_t token_count(const TokenRows<Index>& ids) {
  const int64_t total = ids.rows * ids.columns;
  if (total > kMaxOffset) refuse("at most ", kMaxOffset, " tokens fit int32 offsets, got ", total);
  return total;
}

// Calls start(t, value) at the first token of every run of one value; a run never crosses a row.
template <typename Index, typename Start>
void for_each_run(const TokenRows<Index>& ids, const Start& start) {
  for (int64_t row = 0; row < ids.rows; ++row) {
    const Index* values = ids.data + row * ids.columns;
    const int64_t offset = row * ids.columns;
    for (int64_t column = 0; column < ids.columns; ++column) {
      if (column == 0 || values[column] != values[column - 1]) start(offset + column, values[column]);
    }
  }
}

// Offsets go up from 0 and end inside [0, total]. What every reader of a cu_seqlens relies on.
template <typename Index>
void check_cu_seqlens(const Index* cu, int64_t count, int64_t total) {
  if (count < 1) refuse("cu_seqlens must have at least one entry, the 0 it starts with, got none");
  if (cu[0] != 0) refuse("cu_seqlens must start at 0, got cu_seqlens[0] = ", cu[0]);
  for (int64_t n = 1; n < count; ++n) {
    if (cu[n] < cu[n - 1]) {
      refuse("cu_seqlens must be nondecreasing, got cu_seqlens[", n, "] = ", cu[n], " after ", cu[n - 1]);
    }
  }
  const int64_t last = cu[count - 1];
  if (last > kMaxOffset) refuse("cu_seqlens must fit int32, got cu_seqlens[", count - 1, "] = ", last);
  if (last > total) {
    refuse("cu_seqlens must end inside total = ", total, " tokens, got cu_seqlens[", count - 1, "] = ", last);
  }
}

void check_total(const char* name, int64_t total) {
  if (total < 0 || total > kMaxOffset) refuse(name, " must be in [0, ", kMaxOffset, "], got ", total);
}

// One side's documents: 0 <= starts[n] <= ends[n] <= starts[n + 1], all at most `limit`.
template <typename Index>
void check_documents(const Index* starts, const Index* ends, int64_t count, const char* side, int64_t limit,
                     const char* limit_name) {
  int64_t previous_end = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t start = starts[n];
    const int64_t end = ends[n];
    if (start < previous_end) {
      if (n == 0) refuse("starts_", side, " must not be negative, got starts_", side, "[0] = ", start);
      if (start < starts[n - 1]) {
        refuse("starts_", side, " must be nondecreasing, got starts_", side, "[", n, "] = ", start, " after ",
               starts[n - 1]);
      }
      refuse("documents must not overlap, got starts_", side, "[", n, "] = ", start, " before ends_", side, "[", n - 1,
             "] = ", previous_end);
    }
    if (end < start) {
      refuse("ends_", side, " must not lie before starts_", side, ", got ends_", side, "[", n, "] = ", end,
             " and starts_", side, "[", n, "] = ", start);
    }
    if (end > limit) {
      refuse("ends_", side, " must be at most ", limit_name, limit, ", got ends_", side, "[", n, "] = ", end);
    }
    previous_end = end;
  }
}

}  // namespace

template <typename Index>
void cu_seqlens_from_lengths(const Index* lengths, int64_t count, int32_t* cu) {
  int64_t offset = 0;
  cu[0] = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t length = lengths[n];
    if (length < 0) refuse("lengths must not be negative, got lengths[", n, "] = ", length);
    if (length > kMaxOffset - offset) {
      refuse("lengths must sum to at most ", kMaxOffset, ", got more at lengths[", n, "] = ", length);
    }
    offset += length;
    cu[n + 1] = static_cast<int32_t>(offset);
  }
}

template <typename Index>
std::vector<int32_t> cu_seqlens_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id) {
  const int64_t total = token_count(ids);
  std::vector<int32_t> cu;
  bool last_is_padding = false;
  for_each_run(ids, [&](int64_t token, int64_t value) {
    const bool padding = pad_id.has_value() && value == *pad_id;
    // A row's end does not cut padding: one gap between two documents is one entry.
    if (padding && last_is_padding) return;
    cu.push_back(static_cast<int32_t>(token));
    last_is_padding = padding;
  });
  // Trailing padding: where it starts is where the last document ends.
  if (!last_is_padding) cu.push_back(static_cast<int32_t>(total));
  return cu;
}

template <typename Index>
std::vector<int32_t> cu_seqlens_from_position_ids(const TokenRows<Index>& ids, BoundaryRule rule) {
  const int64_t total = token_count(ids);
  std::vector<int32_t> cu;
  for (int64_t row = 0; row < ids.rows; ++row) {
    const Index* positions = ids.data + row * ids.columns;
    const int64_t offset = row * ids.columns;
    for (int64_t column = 0; column < ids.columns; ++column) {
      bool starts = column == 0;
      if (!starts && rule == BoundaryRule::zero) starts = positions[column] == 0;
      // Not positions[column - 1] + 1, which overflows at the largest value.
      if (!starts && rule == BoundaryRule::step) {
        starts = positions[column] <= positions[column - 1] || positions[column] - 1 != positions[column - 1];
      }
      if (starts) cu.push_back(static_cast<int32_t>(offset + column));
    }
  }
  cu.push_back(static_cast<int32_t>(total));
  return cu;
}

template <typename Index>
Documents documents_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id) {
  const int64_t total = token_count(ids);
  Documents documents;
  bool open = false;
  for_each_run(ids, [&](int64_t token, int64_t value) {
    if (open) documents.ends.push_back(static_cast<int32_t>(token));
    open = !pad_id.has_value() || value != *pad_id;
    if (open) documents.starts.push_back(static_cast<int32_t>(token));
  });
  if (open) documents.ends.push_back(static_cast<int32_t>(total));
  return documents;
}

template <typename Index>
void position_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int64_t* position_ids) {
  check_total("total", total);
  check_cu_seqlens(cu, count, total);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t start = cu[n];
    const int64_t end = n + 1 < count ? static_cast<int64_t>(cu[n + 1]) : total;
    for (int64_t i = start; i < end; ++i) position_ids[i] = i - start;
  }
}

template <typename Index>
void segment_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int32_t* segment_ids) {
  check_total("total", total);
  check_cu_seqlens(cu, count, total);
  for (int64_t n = 0; n + 1 < count; ++n) std::fill(segment_ids + cu[n], segment_ids + cu[n + 1], int32_t(n));
  std::fill(segment_ids + cu[count - 1], segment_ids + total, -1);
}

template <typename Index>
void document_ranges(const DocumentPairs<Index>& documents, int64_t total_q, const DocumentRanges& out) {
  check_total("total_q", total_q);
  const int64_t count = documents.count;
  check_documents(documents.starts_q, documents.ends_q, count, "q", total_q, "total_q = ");
  check_documents(documents.starts_k, documents.ends_k, count, "k", kMaxOffset, "");

  const auto fill = [&out](int64_t first, int64_t last, int64_t begin, int64_t end, int64_t segment) {
    std::fill(out.begin + first, out.begin + last, static_cast<int32_t>(begin));
    std::fill(out.end + first, out.end + last, static_cast<int32_t>(end));
    std::fill(out.segment_ids + first, out.segment_ids + last, static_cast<int32_t>(segment));
  };
  int64_t row = 0;  // rows before it are written
  int64_t gap = 0;  // what a row of no document gets: the end of the document before, in k
  const auto fill_gap = [&](int64_t last) {
    fill(row, last, gap, gap, -1);
    std::fill(out.diagonal + row, out.diagonal + last, static_cast<int32_t>(gap));
  };
  for (int64_t n = 0; n < count; ++n) {
    const int64_t start_q = documents.starts_q[n];
    const int64_t end_q = documents.ends_q[n];
    const int64_t end_k = documents.ends_k[n];
    fill_gap(start_q);
    fill(start_q, end_q, documents.starts_k[n], end_k, n);
    // Bottom-right aligned; equal to start_k + (i - start_q) + (len_k - len_q).
    for (int64_t i = start_q; i < end_q; ++i) out.diagonal[i] = static_cast<int32_t>(end_k - (end_q - i));
    row = end_q;
    gap = end_k;
  }
  fill_gap(total_q);
}

void key_ranges(const int32_t* begin, const int32_t* end, const int32_t* diagonal, const int32_t* prefix_end,
                int64_t rows, const KeyRangeOptions& options, int32_t* key_begin, int32_t* key_end) {
  const int64_t left = std::min(options.window_left, kBeyondAnyRow);
  const int64_t right = options.causal ? 0 : std::min(options.window_right, kBeyondAnyRow);
  // A difference of two int32 values that is not negative fits uint32_t, whose division is the faster one; a chunk
  // beyond it narrows nothing.
  const uint32_t chunk =
      options.chunk_size <= std::numeric_limits<uint32_t>::max() ? static_cast<uint32_t>(options.chunk_size) : 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t first = begin[i];
    const int64_t last = end[i];
    const int64_t center = diagonal != nullptr ? int64_t{diagonal[i]} : i;
    int64_t low = first;
    int64_t high = last;
    if (left >= 0) low = std::max(low, center - left);
    if (right >= 0) high = std::min(high, center + right + 1);
    // A diagonal before the document lies in a chunk before it, which narrows nothing.
    if (chunk > 0 && center >= first) {
      low = std::max(low, first + int64_t{static_cast<uint32_t>(center - first) / chunk} * chunk);
    }
    if (prefix_end != nullptr) high = std::max(high, std::min<int64_t>(prefix_end[i], last));
    low = std::min(low, last);
    high = std::min(std::max(high, low), last);
    key_begin[i] = static_cast<int32_t>(low);
    key_end[i] = static_cast<int32_t>(high);
  }
}

void check_key_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k) {
  KeyRangeCheck check(total_k);
  for (int64_t i = 0; i < total_q; ++i) {
    if (key_begin[i] < key_end[i]) check.row(i, key_begin[i], key_end[i]);
  }
}

void query_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k,
                  int32_t* query_begin, int32_t* query_end) {
  check_total("total_k", total_k);
  check_key_ranges(key_begin, key_end, total_q, total_k);
  // query_begin[j]: the first row whose range ends after j. query_end[j]: one past the last row whose range begins at
  // or before j. Both are written from left to right as the rows' ranges go up.
  int64_t begun = 0;  // keys before it have their query_end
  int64_t ended = 0;  // keys before it have their query_begin
  int64_t last = 0;   // one past the last row so far
  for (int64_t i = 0; i < total_q; ++i) {
    if (key_begin[i] >= key_end[i]) continue;
    // A causal row adds one key: not worth a call of std::fill.
    while (begun < key_begin[i]) query_end[begun++] = static_cast<int32_t>(last);
    while (ended < key_end[i]) query_begin[ended++] = static_cast<int32_t>(i);
    last = i + 1;
  }
  std::fill(query_end + begun, query_end + total_k, static_cast<int32_t>(last));
  std::fill(query_begin + ended, query_begin + total_k, static_cast<int32_t>(total_q));
  // A key between two ranges would get an end before its begin.
  for (int64_t j = 0; j < total_k; ++j) query_end[j] = std::max(query_end[j], query_begin[j]);
}

#define PACKATTN_INSTANTIATE(Index)                                                                           \
  template void cu_seqlens_from_lengths(const Index*, int64_t, int32_t*);                                     \
  template std::vector<int32_t> cu_seqlens_from_segment_ids(const TokenRows<Index>&, std::optional<int64_t>); \
  template std::vector<int32_t> cu_seqlens_from_position_ids(const TokenRows<Index>&, BoundaryRule);          \
  template Documents documents_from_segment_ids(const TokenRows<Index>&, std::optional<int64_t>);             \
  template void position_ids_from_cu_seqlens(const Index*, int64_t, int64_t, int64_t*);                       \
  template void segment_ids_from_cu_seqlens(const Index*, int64_t, int64_t, int32_t*);                        \
  template void document_ranges(const DocumentPairs<Index>&, int64_t, const DocumentRanges&);
PACKATTN_INSTANTIATE(int32_t)
PACKATTN_INSTANTIATE(int64_t)
#undef PACKATTN_INSTANTIATE

}  // namespace packattn::cpu
