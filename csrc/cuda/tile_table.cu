#include <algorithm>
#include <stdexcept>
#include <string>

#include "launch.cuh"
#include "tile_table.cuh"
#include "workspace.h"

namespace packattn::cuda {
namespace {

TileTable cut(Workspace& workspace, int64_t rows, bool scratch) {
  TileTable table;
  table.count = workspace.take_array<int32_t>(1);
  table.tiles = workspace.take_array<Tile>(rows);
  if (scratch) table.scratch = workspace.take_array<Tile>(rows);
  return table;
}

void build(TileTableTask task, int64_t rows, int64_t limit, bool apart, const Stream& stream) {
  if (rows < 0 || rows > INT_MAX || limit < 0 || limit > INT_MAX) {
    throw std::invalid_argument("a tile table takes axes of at most " + std::to_string(INT_MAX) + " rows, got " +
                                std::to_string(rows) + " and " + std::to_string(limit));
  }
  const auto aligned = [](const int32_t* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  task.rows = static_cast<int32_t>(rows);
  task.limit = static_cast<int32_t>(limit);
  task.vector_loads = aligned(task.begin) && aligned(task.end);
  // As many threads as there is work for, in whole warps.
  const int64_t wanted = (rows + kTileRowsPerThread - 1) / kTileRowsPerThread;
  const int threads = static_cast<int>(std::clamp<int64_t>((wanted + kWarp - 1) / kWarp * kWarp, kWarp, 1024));
  launch(stream, apart ? &tile_table_kernel<true> : &tile_table_kernel<false>, 1, threads,
         tile_table_shared_bytes(threads), task);
}

}  // namespace

size_t tile_table_bytes(int64_t rows, bool scratch) {
  Workspace workspace(nullptr);
  cut(workspace, rows, scratch);
  return workspace.bytes();
}

TileTable tile_table_at(void* memory, int64_t rows, bool scratch) {
  Workspace workspace(memory);
  return cut(workspace, rows, scratch);
}

void build_tile_table(const int32_t* begin, const int32_t* end, int64_t rows, int64_t limit, int tile_rows,
                      TileTable table, const Stream& stream) {
  build({begin, end, 0, 0, tile_rows, 0, false, table, {}}, rows, limit, false, stream);
}

void build_tile_tables(const int32_t* begin, const int32_t* end, int64_t rows, int64_t limit, int tile_rows,
                       TileTable table, int few_tile_rows, TileTable few, const Stream& stream) {
  if (few_tile_rows < 1 || kFewRows % few_tile_rows != 0) {
    throw std::invalid_argument("few_tile_rows must divide " + std::to_string(kFewRows) + ", got " +
                                std::to_string(few_tile_rows));
  }
  build({begin, end, 0, 0, tile_rows, few_tile_rows, false, table, few}, rows, limit, true, stream);
}

}  // namespace packattn::cuda
