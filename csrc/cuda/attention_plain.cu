#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention_plain.h"
#include "attention_plain_backward.cuh"
#include "launch.cuh"
#include "metadata.h"
#include "workspace.h"

namespace packattn::cuda {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX - 1024;  // a block of keys may be counted past the end

void check_sizes(const AttentionForwardParams& p) {
  const auto tokens = [](const char* name, int64_t n) {
    if (n >= 0 && n <= kMaxTokens) return;
    throw std::invalid_argument(std::string(name) + " must be in [0, " + std::to_string(kMaxTokens) + "], got " +
                                std::to_string(n));
  };
  tokens("total_q", p.total_q);
  tokens("total_k", p.total_k);
  if (p.heads_q < 1 || p.heads_k < 1 || p.heads_q % p.heads_k != 0) {
    throw std::invalid_argument("heads_q must be a multiple of heads_k, got " + std::to_string(p.heads_q) +
                                " query heads and " + std::to_string(p.heads_k) + " key heads");
  }
  if (p.head_dim < 1 || p.head_dim_v < 1) {
    throw std::invalid_argument("head dims must be positive, got " + std::to_string(p.head_dim) + " and " +
                                std::to_string(p.head_dim_v));
  }
}

// Calls body with the element type: float, bf16_t() or f16_t().
template <class Body>
void with_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32: return body(float());
    case DType::bfloat16: return body(bf16_t());
    case DType::float16: return body(f16_t());
  }
  throw std::invalid_argument("dtype must be float32, bfloat16 or float16");
}

// Enough blocks to fill the device; each takes its share of the items. There is at most one tile for each row.
int64_t grid(const Stream& stream, int groups, int64_t rows, int heads, int columns) {
  const int64_t slices = (columns + groups * plain::kTile - 1) / (groups * plain::kTile);
  const int64_t blocks = static_cast<int64_t>(stream.device.multiprocessors) * plain::blocks_per_multiprocessor(groups);
  return std::min(blocks, rows * heads * slices);
}

template <class T, int GROUPS>
void run_forward(const ForwardTask& task, const Stream& stream) {
  launch(stream, plain::forward_kernel<T, GROUPS>, grid(stream, GROUPS, task.total_q, task.heads_q, task.head_dim_v),
         plain::kThreads, plain::kForwardShared, task);
}

template <class T, int GROUPS>
void run_dquery(const plain::PlainBackwardTask& task, const Stream& stream) {
  launch(stream, plain::dquery_kernel<T, GROUPS>, grid(stream, GROUPS, task.total_q, task.heads_q, task.head_dim),
         plain::kThreads, plain::kBackwardShared, task);
}

template <class T, int GROUPS>
void run_dkey(const plain::PlainBackwardTask& task, const Stream& stream) {
  const int columns = std::max(task.head_dim, task.head_dim_v);
  launch(stream, plain::dkey_kernel<T, GROUPS>, grid(stream, 2 * GROUPS, task.total_k, 2 * task.heads_k, columns),
         plain::kThreads, plain::kBackwardShared, task);
}

struct BackwardParts {
  int32_t* query_begin;
  int32_t* query_end;
  void* query_ranges;

  BackwardParts(plain::PlainBackwardTask& task, Workspace& workspace) {
    query_begin = workspace.take_array<int32_t>(task.total_k);
    query_end = workspace.take_array<int32_t>(task.total_k);
    query_ranges = workspace.take(query_ranges_workspace_bytes(task.total_q, task.total_k));
    task.query_tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_q)), task.total_q);
    task.key_tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_k)), task.total_k);
    task.delta = workspace.take_array<float>(task.total_q * task.heads_q);
  }
};

plain::PlainBackwardTask backward_task(const AttentionBackwardParams& params) {
  plain::PlainBackwardTask task;
  static_cast<AttentionBackwardParams&>(task) = params;
  return task;
}

}  // namespace

size_t plain_forward_workspace_bytes(const AttentionForwardParams& params) { return tile_table_bytes(params.total_q); }

size_t plain_backward_workspace_bytes(const AttentionBackwardParams& params) {
  plain::PlainBackwardTask task = backward_task(params);
  Workspace workspace(nullptr);
  BackwardParts parts(task, workspace);
  static_cast<void>(parts);
  return workspace.bytes();
}

void plain_forward(const AttentionForwardParams& params, void* workspace, const Stream& stream) {
  check_sizes(params);
  const ForwardTask task{params, tile_table_at(workspace, params.total_q)};
  build_tile_table(task.key_begin, task.key_end, task.total_q, task.total_k, plain::kTile, task.tiles, stream);
  with_element(task.dtype, [&]<class T>(T) {
    task.head_dim_v <= 128 ? run_forward<T, 2>(task, stream) : run_forward<T, 4>(task, stream);
  });
}

void plain_backward(const AttentionBackwardParams& params, void* memory, const Stream& stream) {
  check_sizes(params);
  plain::PlainBackwardTask task = backward_task(params);
  Workspace workspace(memory);
  const BackwardParts parts(task, workspace);
  query_ranges(task.key_begin, task.key_end, task.total_q, task.total_k, parts.query_begin, parts.query_end,
               parts.query_ranges, stream);
  build_tile_table(task.key_begin, task.key_end, task.total_q, task.total_k, plain::kTile, task.query_tiles, stream);
  build_tile_table(parts.query_begin, parts.query_end, task.total_k, task.total_q, plain::kTile, task.key_tiles,
                   stream);
  const int64_t rows_of_a_block = plain::kThreads / kWarp;
  const int64_t row_blocks = (task.total_q * task.heads_q + rows_of_a_block - 1) / rows_of_a_block;
  with_element(task.dtype, [&]<class T>(T) {
    launch(stream, plain::delta_kernel<T>, std::min<int64_t>(row_blocks, stream.device.multiprocessors * 8),
           plain::kThreads, 0, task);
    task.head_dim <= 128 ? run_dquery<T, 2>(task, stream) : run_dquery<T, 4>(task, stream);
    std::max(task.head_dim, task.head_dim_v) <= 64 ? run_dkey<T, 1>(task, stream) : run_dkey<T, 2>(task, stream);
  });
  if (task.sinks != nullptr) {
    launch(stream, plain::dsinks_kernel, task.heads_q, plain::kThreads, kBlockScanBytes<plain::DoubleSum>, task);
  }
}

}  // namespace packattn::cuda
