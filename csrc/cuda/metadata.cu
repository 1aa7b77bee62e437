#include <algorithm>
#include <stdexcept>
#include <string>

#include "launch.cuh"
#include "metadata.cuh"
#include "metadata.h"
#include "workspace.h"

namespace packattn::cuda {
namespace {

void check_size(const char* name, int64_t size, int64_t smallest = 0) {
  if (size >= smallest && size <= INT_MAX) return;
  throw std::invalid_argument(std::string(name) + " must be in [" + std::to_string(smallest) + ", " +
                              std::to_string(INT_MAX) + "], got " + std::to_string(size));
}

// One thread for each of `count` tokens.
template <typename... Parameters>
void launch_for_each(const Stream& stream, void (*kernel)(Parameters...), int64_t count,
                     const std::type_identity_t<Parameters>&... arguments) {
  launch(stream, kernel, (count + kMetadataThreads - 1) / kMetadataThreads, kMetadataThreads, 0, arguments...);
}

template <class Job>
void run_scan(const Job& job, void* workspace, const Stream& stream) {
  using Value = typename Job::Value;
  static_assert(kMaxSpans * sizeof(Value) <= kScanWorkspaceBytes);
  const int64_t rounds = (job.count + kScanRound - 1) / kScanRound;
  const int64_t rounds_of_a_block = (rounds + kMaxSpans - 1) / kMaxSpans;
  const int64_t span = std::max<int64_t>(rounds_of_a_block, 1) * kScanRound;
  const int64_t blocks = std::max<int64_t>((job.count + span - 1) / span, 1);  // also an empty axis is finished
  Value* spans = static_cast<Value*>(workspace);
  if (blocks > 1) {
    launch(stream, combine_spans_kernel<Job>, blocks, kMetadataThreads, kScanShared<Job>, job, span, spans);
  }
  launch(stream, scan_kernel<Job>, blocks, kMetadataThreads, kScanShared<Job>, job, span, spans);
}

template <typename Index>
Tokens<Index> tokens_of(const TokenRows<Index>& ids) {
  check_size("rows", ids.rows);
  check_size("columns", ids.columns);
  check_size("tokens", ids.rows * ids.columns);
  return {ids.data, static_cast<uint32_t>(ids.columns), static_cast<int32_t>(ids.rows * ids.columns)};
}

template <class Rule>
void run_cu_seqlens(const Rule& rule, int64_t max_segments, int32_t* cu, int32_t* segments, void* workspace,
                    const Stream& stream) {
  check_size("max_segments", max_segments);
  run_scan(CuSeqlensJob<Rule>{rule, rule.tokens.total, max_segments, cu, segments}, workspace, stream);
}

struct QueryRangesWorkspace {
  void* scan;
  int32_t* seeing;
  int32_t* rows;

  QueryRangesWorkspace(Workspace& workspace, int64_t total_q)
      : scan(workspace.take(kScanWorkspaceBytes)),
        seeing(workspace.take_array<int32_t>(1)),
        rows(workspace.take_array<int32_t>(total_q)) {}
};

}  // namespace

template <typename Index>
void cu_seqlens_from_lengths(const Index* lengths, int64_t count, int32_t* cu, void* workspace, const Stream& stream) {
  check_size("the number of lengths", count);
  run_scan(OffsetsJob<Index>{lengths, count, cu}, workspace, stream);
}

template <typename Index>
void cu_seqlens_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id, int64_t max_segments,
                                 int32_t* cu, int32_t* segments, void* workspace, const Stream& stream) {
  const SegmentRule<Index> rule{tokens_of(ids), pad_id.has_value(), pad_id.value_or(0), true};
  run_cu_seqlens(rule, max_segments, cu, segments, workspace, stream);
}

template <typename Index>
void cu_seqlens_from_position_ids(const TokenRows<Index>& ids, BoundaryRule rule, int64_t max_segments, int32_t* cu,
                                  int32_t* segments, void* workspace, const Stream& stream) {
  run_cu_seqlens(PositionRule<Index>{tokens_of(ids), rule}, max_segments, cu, segments, workspace, stream);
}

template <typename Index>
void documents_from_segment_ids(const TokenRows<Index>& ids, std::optional<int64_t> pad_id, int64_t max_segments,
                                int32_t* starts, int32_t* ends, int32_t* segments, void* workspace,
                                const Stream& stream) {
  check_size("max_segments", max_segments);
  const SegmentRule<Index> rule{tokens_of(ids), pad_id.has_value(), pad_id.value_or(0), false};
  run_scan(DocumentsJob<SegmentRule<Index>>{rule, rule.tokens.total, max_segments, starts, ends, segments}, workspace,
           stream);
}

template <typename Index>
void position_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int64_t* position_ids,
                                  const Stream& stream) {
  check_size("the number of entries of cu_seqlens", count, 1);
  check_size("total", total);
  launch_for_each(stream, position_ids_kernel<Index>, total, cu, count, total, position_ids);
}

template <typename Index>
void segment_ids_from_cu_seqlens(const Index* cu, int64_t count, int64_t total, int32_t* segment_ids,
                                 const Stream& stream) {
  check_size("the number of entries of cu_seqlens", count, 1);
  check_size("total", total);
  launch_for_each(stream, segment_ids_kernel<Index>, total, cu, count, total, segment_ids);
}

template <typename Index>
void document_ranges(const DocumentPairs<Index>& documents, int64_t total_q, const DocumentRanges& out,
                     const Stream& stream) {
  check_size("the number of documents", documents.count);
  check_size("total_q", total_q);
  launch_for_each(stream, document_ranges_kernel<Index>, total_q, documents, total_q, out);
}

void key_ranges(const int32_t* begin, const int32_t* end, const int32_t* diagonal, const int32_t* prefix_end,
                int64_t rows, const KeyRangeOptions& options, int32_t* key_begin, int32_t* key_end,
                const Stream& stream) {
  check_size("rows", rows);
  // A chunk beyond any difference of two int32 values narrows nothing.
  const bool chunks = options.chunk_size > 0 && options.chunk_size <= UINT_MAX;
  const KeyRangesTask task{begin,
                           end,
                           diagonal,
                           prefix_end,
                           rows,
                           std::min(options.window_left, kBeyondAnyRow),
                           options.causal ? 0 : std::min(options.window_right, kBeyondAnyRow),
                           chunks ? static_cast<uint32_t>(options.chunk_size) : 0,
                           key_begin,
                           key_end};
  launch_for_each(stream, key_ranges_kernel, rows, task);
}

size_t query_ranges_workspace_bytes(int64_t total_q, int64_t) {
  Workspace workspace(nullptr);
  const QueryRangesWorkspace parts(workspace, total_q);
  static_cast<void>(parts);
  return workspace.bytes();
}

void query_ranges(const int32_t* key_begin, const int32_t* key_end, int64_t total_q, int64_t total_k,
                  int32_t* query_begin, int32_t* query_end, void* memory, const Stream& stream) {
  check_size("total_q", total_q);
  check_size("total_k", total_k);
  Workspace workspace(memory);
  const QueryRangesWorkspace parts(workspace, total_q);
  const SeeingRowsJob job{key_begin, key_end, total_q, static_cast<int32_t>(total_k), parts.rows, parts.seeing};
  run_scan(job, parts.scan, stream);
  launch_for_each(stream, query_ranges_kernel, total_k, job, query_begin, query_end);
}

#define PACKATTN_INSTANTIATE(Index)                                                                              \
  template void cu_seqlens_from_lengths(const Index*, int64_t, int32_t*, void*, const Stream&);                  \
  template void cu_seqlens_from_segment_ids(const TokenRows<Index>&, std::optional<int64_t>, int64_t, int32_t*,  \
                                            int32_t*, void*, const Stream&);                                     \
  template void cu_seqlens_from_position_ids(const TokenRows<Index>&, BoundaryRule, int64_t, int32_t*, int32_t*, \
                                             void*, const Stream&);                                              \
  template void documents_from_segment_ids(const TokenRows<Index>&, std::optional<int64_t>, int64_t, int32_t*,   \
                                           int32_t*, int32_t*, void*, const Stream&);                            \
  template void position_ids_from_cu_seqlens(const Index*, int64_t, int64_t, int64_t*, const Stream&);           \
  template void segment_ids_from_cu_seqlens(const Index*, int64_t, int64_t, int32_t*, const Stream&);            \
  template void document_ranges(const DocumentPairs<Index>&, int64_t, const DocumentRanges&, const Stream&);
PACKATTN_INSTANTIATE(int32_t)
PACKATTN_INSTANTIATE(int64_t)
#undef PACKATTN_INSTANTIATE

}  // namespace packattn::cuda
