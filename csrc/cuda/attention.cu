// Plans a call: which kernels, how their scratch memory is cut, in which order they are launched.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "attention_plain.h"
#include "instantiations.h"
#include "kernels.h"
#include "metadata.h"
#include "select.h"
#include "tile_table.h"
#include "workspace.h"

namespace packattn::cuda {
namespace {

// The tensor-core kernels count rows and keys in int32, and look a few blocks past the last.
constexpr int64_t kMaxTokens = INT32_MAX - 1024;

void check_sizes(const AttentionForwardParams& params) {
  const auto check = [](const char* name, int64_t tokens) {
    if (tokens >= 0 && tokens <= kMaxTokens) return;
    throw std::invalid_argument(std::string(name) + " must be in [0, " + std::to_string(kMaxTokens) + "], got " +
                                std::to_string(tokens));
  };
  check("total_q", params.total_q);
  check("total_k", params.total_k);
}

void plan_forward(ForwardTask& task, const ForwardKernel& kernel, Workspace& workspace) {
  task.tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_q)), task.total_q);
  if (kernel.few_tile_rows == nullptr) return;
  task.few_tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_q, false)), task.total_q, false);
}

struct BackwardParts {
  void* query_ranges = nullptr;  // scratch of query_ranges
  int32_t* query_begin = nullptr;
  int32_t* query_end = nullptr;
};

BackwardParts plan_backward(BackwardTask& task, const BackwardKernel& kernel, Workspace& workspace) {
  BackwardParts parts;
  parts.query_begin = workspace.take_array<int32_t>(task.total_k);
  parts.query_end = workspace.take_array<int32_t>(task.total_k);
  parts.query_ranges = workspace.take(query_ranges_workspace_bytes(task.total_q, task.total_k));
  task.query_begin = parts.query_begin;
  task.query_end = parts.query_end;
  task.query_tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_q)), task.total_q);
  task.key_tiles = tile_table_at(workspace.take(tile_table_bytes(task.total_k)), task.total_k);
  task.scratch = workspace.take(kernel.scratch_bytes(task));
  return parts;
}

}  // namespace

size_t forward_workspace_bytes(const AttentionForwardParams& params, const Device& device) {
  const Choice choice = select(forward_call(params, device.capability));
  if (choice.family == Family::plain) return plain_forward_workspace_bytes(params);
  ForwardTask task{params, {}};
  Workspace workspace(nullptr);
  plan_forward(task, forward_kernel(params.dtype, choice), workspace);
  return workspace.bytes();
}

size_t backward_workspace_bytes(const AttentionBackwardParams& params, const Device& device) {
  const Choice choice = select(backward_call(params, device.capability));
  if (choice.family == Family::plain) return plain_backward_workspace_bytes(params);
  BackwardTask task{params, {}, {}, nullptr, nullptr, nullptr};
  Workspace workspace(nullptr);
  plan_backward(task, backward_kernel(params.dtype, choice), workspace);
  return workspace.bytes();
}

void attention_forward(const AttentionForwardParams& params, void* memory, const Stream& stream) {
  const Choice choice = select(forward_call(params, stream.device.capability));
  if (choice.family == Family::plain) {
    plain_forward(params, memory, stream);
    return;
  }
  check_sizes(params);
  const ForwardKernel kernel = forward_kernel(params.dtype, choice);
  ForwardTask task{params, {}};
  Workspace workspace(memory);
  plan_forward(task, kernel, workspace);
  const int rows = kernel.tile_rows(stream.device);
  if (kernel.few_tile_rows == nullptr) {
    build_tile_table(task.key_begin, task.key_end, task.total_q, task.total_k, rows, task.tiles, stream);
  } else {
    build_tile_tables(task.key_begin, task.key_end, task.total_q, task.total_k, rows, task.tiles,
                      kernel.few_tile_rows(task), task.few_tiles, stream);
  }
  kernel.run(task, stream);
}

void attention_backward(const AttentionBackwardParams& params, void* memory, const Stream& stream) {
  const Choice choice = select(backward_call(params, stream.device.capability));
  if (choice.family == Family::plain) {
    plain_backward(params, memory, stream);
    return;
  }
  check_sizes(params);
  const BackwardKernel kernel = backward_kernel(params.dtype, choice);
  BackwardTask task{params, {}, {}, nullptr, nullptr, nullptr};
  Workspace workspace(memory);
  const BackwardParts parts = plan_backward(task, kernel, workspace);
  query_ranges(task.key_begin, task.key_end, task.total_q, task.total_k, parts.query_begin, parts.query_end,
               parts.query_ranges, stream);
  build_tile_table(task.key_begin, task.key_end, task.total_q, task.total_k, kernel.query_rows(stream.device),
                   task.query_tiles, stream);
  build_tile_table(task.query_begin, task.query_end, task.total_k, task.total_q, kernel.key_rows(stream.device),
                   task.key_tiles, stream);
  kernel.run(task, stream);
}

}  // namespace packattn::cuda
