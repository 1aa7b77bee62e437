#include <algorithm>
#include <stdexcept>
#include <string>

#include "launch.cuh"
#include "tile_table.cuh"
#include "workspace.h"

namespace packattn::cuda {
namespace {

TileTable cut(Workspace& workspace, int64_t rows) {
  TileTable table;
  table.count = workspace.take_array<int32_t>(1);
  table.tiles = workspace.take_array<Tile>(rows);
  table.scratch = workspace.take_array<Tile>(rows);
  return table;
}

}  // namespace

size_t tile_table_bytes(int64_t rows) {
  Workspace workspace(nullptr);
  cut(workspace, rows);
  return workspace.bytes();
}

TileTable tile_table_at(void* memory, int64_t rows) {
  Workspace workspace(memory);
  return cut(workspace, rows);
}

void build_tile_table(const int32_t* begin, const int32_t* end, int64_t rows, int64_t limit, int tile_rows,
                      TileTable table, const Stream& stream) {
  if (rows < 0 || rows > INT_MAX || limit < 0 || limit > INT_MAX) {
    throw std::invalid_argument("a tile table takes axes of at most " + std::to_string(INT_MAX) + " rows, got " +
                                std::to_string(rows) + " and " + std::to_string(limit));
  }
  const auto aligned = [](const int32_t* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const TileTableTask task{
      begin, end, static_cast<int32_t>(rows), static_cast<int32_t>(limit), tile_rows, aligned(begin) && aligned(end),
      table};
  // As many threads as there is work for, in whole warps.
  const int64_t wanted = (rows + kTileRowsPerThread - 1) / kTileRowsPerThread;
  const int threads = static_cast<int>(std::clamp<int64_t>((wanted + kWarp - 1) / kWarp * kWarp, kWarp, 1024));
  launch(stream, tile_table_kernel, 1, threads, tile_table_shared_bytes(threads), task);
}

}  // namespace packattn::cuda
