// The tile table: rows of a packed axis cut into tiles that lie inside one document, built on the device.
// What a component is, the order of the table and how it is built: tile_table.cuh.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device.h"

namespace packattn::cuda {

// Rows [row, row + rows) of one component, and the range [begin, end) of the other axis that any of them sees, inside
// [0, limit]; 0, 0 where none sees anything.
struct alignas(16) Tile {
  int32_t row;
  int32_t rows;
  int32_t begin;
  int32_t end;
};

// Device memory. The first *count entries of tiles are the tiles, those with the most work first; every row is in one.
struct TileTable {
  int32_t* count = nullptr;
  Tile* tiles = nullptr;    // [rows of the axis]
  Tile* scratch = nullptr;  // [rows of the axis], the builder's own; a table for few rows has none
};

// Bytes that a table over `rows` rows takes, and the table at an address (aligned to 256) that has them.
size_t tile_table_bytes(int64_t rows, bool scratch = true);
TileTable tile_table_at(void* memory, int64_t rows, bool scratch = true);

// begin, end: int32 [rows], any values; those of row i say that it sees begin[i] <= j < end[i] of [0, limit).
// tile_rows: the most rows of a tile. One launch of one block. Throws std::invalid_argument for axes longer than an
// int32 counts.
void build_tile_table(const int32_t* begin, const int32_t* end, int64_t rows, int64_t limit, int tile_rows,
                      TileTable table, const Stream& stream);

// The same in two tables, for two kernels: `few` gets the components of which at most kFewRows rows see anything, in
// tiles of few_tile_rows rows (a divisor of kFewRows), `table` the rest. What such a component has past its first
// kFewRows rows sees nothing and goes to `table`, so that padding is cut into large tiles. One launch as well.
constexpr int kFewRows = 64;
void build_tile_tables(const int32_t* begin, const int32_t* end, int64_t rows, int64_t limit, int tile_rows,
                       TileTable table, int few_tile_rows, TileTable few, const Stream& stream);

}  // namespace packattn::cuda
