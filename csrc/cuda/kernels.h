// What the planner (attention.cu) hands to a tensor-core kernel, and what each instantiation tells the planner.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../common/params.h"
#include "device.h"
#include "tile_table.h"

namespace packattn::cuda {

// head_dim and head_dim_v may be smaller than the instantiation's: columns past them are zero-filled and not stored.
struct ForwardTask : AttentionForwardParams {
  TileTable tiles;        // of query rows, at most ForwardKernel::tile_rows each, with the keys that they see
  TileTable few_tiles{};  // of documents of few rows, at most ForwardKernel::few_tile_rows each; see build_tile_tables
};

struct BackwardTask : AttentionBackwardParams {
  TileTable query_tiles;  // of query rows, at most BackwardKernel::query_rows each, with the keys that they see
  TileTable key_tiles;    // of keys, at most BackwardKernel::key_rows each, with the query rows that see them
  const int32_t* query_begin = nullptr;  // [Tk], the rows that see key j are query_begin[j] <= i < query_end[j]
  const int32_t* query_end = nullptr;    // [Tk]
  void* scratch = nullptr;               // BackwardKernel::scratch_bytes bytes, aligned to 256
};

// Tile sizes may depend on the device (shared memory); nothing else does.
struct ForwardKernel {
  int (*tile_rows)(const Device& device);
  void (*run)(const ForwardTask& task, const Stream& stream);
  int (*few_tile_rows)(const AttentionForwardParams& params) = nullptr;  // nullptr: one table for all documents
};

struct BackwardKernel {
  int (*query_rows)(const Device& device);
  int (*key_rows)(const Device& device);
  size_t (*scratch_bytes)(const AttentionBackwardParams& params);  // row statistics and partial sums
  void (*run)(const BackwardTask& task, const Stream& stream);     // statistics, dsinks, dkey and dvalue, dquery
};

// One file each in instantiations/, named like the function: forward_bfloat16_192_128.cu holds
// ForwardKernel forward_bfloat16_192_128(). attention.cu has the table of them.

}  // namespace packattn::cuda
