// Conversions between the ways a packed row is described: lengths, cu_seqlens, position ids, segment ids, documents
// and the key ranges that attention takes. Plain loops over host memory; no Torch.
//
// Every function reads its whole input before it trusts a value of it, does its arithmetic in 64 bits, and throws
// std::invalid_argument with a message that names the argument, the entry and the value. `Index` is int32_t or
// int64_t. Offsets are int32, so a packed row holds at most 2^31 - 1 tokens.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "../common/metadata.h"

namespace packattn::cpu {

using packattn::BoundaryRule;
using packattn::DocumentPairs;
using packattn::DocumentRanges;
using packattn::KeyRangeOptions;
using packattn::TokenRows;

// First token and one past the last token of each document.
struct Documents {
  std::vector<int32_t> starts;
  std::vector<int32_t> ends;
};

// cu[0] = 0, cu[n + 1] = cu[n] + lengths[n]. cu has count + 1 entries.
template <typename Index>
void cu_seqlens_from_lengths(const Index* lengths, int64_t count, int32_t* cu);

// A document starts where the value changes and at every row. A run of pad_id before or between documents is one entry,
// because a cu_seqlens has no gaps; padding after the last document lies past the last offset.
template <typename Index>
std::vector<int32_t> cu_seqlens_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id);

template <typename Index>
std::vector<int32_t> cu_seqlens_from_position_ids(const TokenRows<Index>& ids, BoundaryRule rule);

// As cu_seqlens_from_segment_ids, without the padding.
template <typename Index>
Documents documents_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id);

// position_ids[i] = i - start of i's entry, for i in [0, total). Rows past the last offset count from 0.
template <typename Index>
void position_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int64_t* position_ids);

// segment_ids[i] = number of i's entry, for i in [0, total). Rows past the last offset are -1.
template <typename Index>
void segment_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int32_t* segment_ids);

// A row of no document gets begin = end = diagonal = the last key offset before it, so that ranges stay nondecreasing.
template <typename Index>
void document_ranges(const DocumentPairs<Index>& documents, int64_t total_q, const DocumentRanges& out);

// The keys each row sees: its document's [begin, end), narrowed by causality, window and chunk about the row's
// diagonal (null: the row's own number) and widened to prefix_end (null: no prefix). Stays inside [begin, end).
// All arrays have `rows` entries.
void key_ranges(const int32_t* begin, const int32_t* end, const int32_t* diagonal, const int32_t* prefix_end,
                int64_t rows, const KeyRangeOptions& options, int32_t* key_begin, int32_t* key_end);

// Over the rows that see anything: 0 <= key_begin, key_end <= total_k, and both nondecreasing. Other rows may hold
// anything. Throws otherwise.
void check_key_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k);

// The transpose of the key ranges: the rows [query_begin[j], query_end[j]) that see key j. Checks its input as
// check_key_ranges does. Rows that see nothing may lie inside a range.
void query_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k,
                  int32_t* query_begin, int32_t* query_end);

}  // namespace packattn::cpu
