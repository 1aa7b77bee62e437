// Conversions between the ways a packed row is described, on the device: the functions of csrc/cpu/metadata.h, with the
// same results for the same valid input. Nothing here waits for the device or depends on values: every shape is given.
//
// All pointers are device memory. Values are not checked (that would mean to wait): wrong ones give wrong numbers, but
// no access outside the buffers, whatever they are. What is said about wrong values below holds too. Sizes are checked:
// std::invalid_argument. `Index` is int32_t or int64_t. `workspace`: kScanWorkspaceBytes bytes, aligned to 256, unless
// said otherwise.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include "../common/metadata.h"
#include "device.h"

namespace packattn::cuda {

constexpr size_t kScanWorkspaceBytes = 4096;

// cu[0] = 0, cu[n + 1] = cu[n] + lengths[n]. cu has count + 1 entries. Negative lengths count as 0, sums stop at the
// largest int32.
template <typename Index>
void cu_seqlens_from_lengths(const Index* lengths, int64_t count, int32_t* cu, void* workspace, const Stream& stream);

// cu: [max_segments + 1]; entries that are not needed repeat the last offset. segments: [1] or nullptr, gets how many
// entries there are, which may be more than max_segments. Then the first max_segments are kept, and the tokens of the
// others lie past the last offset: they belong to no document and see nothing, so nothing leaks.
template <typename Index>
void cu_seqlens_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id, int64_t max_segments,
                                 int32_t* cu, int32_t* segments, void* workspace, const Stream& stream);

template <typename Index>
void cu_seqlens_from_position_ids(const TokenRows<Index>& ids, BoundaryRule rule, int64_t max_segments, int32_t* cu,
                                  int32_t* segments, void* workspace, const Stream& stream);

// starts, ends: [max_segments]; entries that are not needed hold the end of the last document (0 without one).
// segments and documents past max_segments: as above.
template <typename Index>
void documents_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id, int64_t max_segments,
                                int32_t* starts, int32_t* ends, int32_t* segments, void* workspace,
                                const Stream& stream);

template <typename Index>
void position_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int64_t* position_ids,
                                  const Stream& stream);

template <typename Index>
void segment_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int32_t* segment_ids,
                                 const Stream& stream);

template <typename Index>
void document_ranges(const DocumentPairs<Index>& documents, int64_t total_q, const DocumentRanges& out,
                     const Stream& stream);

void key_ranges(const int32_t* begin, const int32_t* end, const int32_t* diagonal, const int32_t* prefix_end,
                int64_t rows, const KeyRangeOptions& options, int32_t* key_begin, int32_t* key_end,
                const Stream& stream);

// workspace: query_ranges_workspace_bytes() bytes, aligned to 256. Results lie in [0, total_q].
size_t query_ranges_workspace_bytes(int64_t total_q, int64_t total_k);
void query_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k,
                  int32_t* query_begin, int32_t* query_end, void* workspace, const Stream& stream);

}  // namespace packattn::cuda
