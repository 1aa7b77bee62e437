// Builds the tile table (tile_table.h) on the device: one launch of one block, no atomics, nothing read back.
//
// Components. A packed row falls into stretches of rows whose ranges have nothing in common. A row that sees anything
// starts a new component iff the row before sees nothing or ends before this one begins:
//
//     row i is a border   iff   begin[i] < end[i]  and  (i == 0  or  begin[i-1] >= end[i-1]  or  begin[i] >= end[i-1])
//
// For ranges that are nondecreasing this is exact, and it holds at the first row of every document that sees anything,
// while rows of one document overlap (causal, windowed, bidirectional). The rule looks at two rows only, so it is the
// same for a document alone and packed, and for wrong ranges it is merely a rule. Rows that see nothing belong to the
// component before them, those before the first border to a component of their own.
//
// Tiles. A component is cut every tile_rows rows from its first. A tile's range spans those of its rows that see
// anything, whether or not they are in order, so every row's range lies inside its tile's.
//
// Components of few rows (build_tile_tables). A row after one that sees nothing is a border if it sees anything, so the
// rows of a component that see anything are its first; whether they are more than kFewRows is known from the kFewRows
// rows after its border, and is the same whatever comes behind the document.
//
// Order. Tiles are started in the order of the table, so those with the longest range come first: a counting sort over
// kBuckets classes of cost (a float's exponent and first three bits of fraction, so costs in a class differ by less
// than 1/8). It is stable, hence the table is the same in every run.
#pragma once
#include "row_range.cuh"
#include "scan.cuh"
#include "tile_table.h"

namespace packattn::cuda {

constexpr int kTileRowsPerThread = 8;
constexpr int kBuckets = 256;

// Position of the last border, and whether its component has few rows.
struct LastBorder {
  uint32_t code;  // 2 (row + 1) + few; 0 for none
  PACKATTN_DEVICE static LastBorder identity() { return {0}; }
  PACKATTN_DEVICE static LastBorder at(int32_t row, bool few) { return {2 * (static_cast<uint32_t>(row) + 1) + few}; }
  PACKATTN_DEVICE LastBorder then(const LastBorder& next) const { return {next.code > code ? next.code : code}; }
  // Where the component starts that goes on after it. What comes before all borders sees nothing: few rows.
  PACKATTN_DEVICE int32_t component() const { return code == 0 ? 0 : static_cast<int32_t>(code / 2 - 1); }
  PACKATTN_DEVICE bool few() const { return code == 0 || (code & 1) != 0; }
};

// A stretch of rows: how many tiles start in it, and the first row (~row if the tile goes to the table for few rows)
// and the range of the last of them. Where none starts, the range is that of the stretch, which goes on what was
// before.
struct LastTile {
  int32_t started;
  int32_t row;
  int32_t begin;
  int32_t end;
  PACKATTN_DEVICE static LastTile identity() { return {0, 0, INT_MAX, 0}; }
  PACKATTN_DEVICE LastTile then(const LastTile& next) const {
    if (next.started > 0) return {started + next.started, next.row, next.begin, next.end};
    return {started, row, next.begin < begin ? next.begin : begin, next.end > end ? next.end : end};
  }
};

struct Sum {
  int32_t value;
  PACKATTN_DEVICE static Sum identity() { return {0}; }
  PACKATTN_DEVICE Sum then(const Sum& next) const { return {value + next.value}; }
};

struct TileTableTask {
  const int32_t* begin;  // [rows]
  const int32_t* end;    // [rows]
  int32_t rows;
  int32_t limit;
  int32_t tile_rows;
  int32_t few_tile_rows;
  bool vector_loads;  // begin and end are aligned to 16 bytes
  TileTable table;
  TileTable few;
};

// Shared memory of the builder: two areas for scans, then a counter for every bucket and warp; before these are used, a
// word for every eight rows of a round and kFewRows more.
constexpr int kBorderScan = 0;
constexpr int kTileScan = kBorderScan + kBlockScanBytes<LastBorder>;
constexpr int kBucketCounts = kTileScan + kBlockScanBytes<LastTile>;
constexpr int kRuns = kBucketCounts;
constexpr int tile_table_shared_bytes(int threads) { return kBucketCounts + kBuckets * (threads / kWarp) * 4; }

// The ranges of the rows first, first + 1, ...; empty past the end of the axis.
PACKATTN_DEVICE void load_ranges(const TileTableTask& task, int64_t first, RowRange (&ranges)[kTileRowsPerThread]) {
  int32_t begin[kTileRowsPerThread] = {};
  int32_t end[kTileRowsPerThread] = {};
  if (task.vector_loads && first + kTileRowsPerThread <= task.rows) {
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; k += 4) {
      const int4 b = ptx::load_global(reinterpret_cast<const int4*>(task.begin + first + k));
      const int4 e = ptx::load_global(reinterpret_cast<const int4*>(task.end + first + k));
      begin[k] = b.x, begin[k + 1] = b.y, begin[k + 2] = b.z, begin[k + 3] = b.w;
      end[k] = e.x, end[k + 1] = e.y, end[k + 2] = e.z, end[k + 3] = e.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; ++k) {
      if (first + k >= task.rows) continue;
      begin[k] = ptx::load_global(task.begin + first + k);
      end[k] = ptx::load_global(task.end + first + k);
    }
  }
#pragma unroll
  for (int k = 0; k < kTileRowsPerThread; ++k) ranges[k] = RowRange::clamped(begin[k], end[k], task.limit);
}

// The range of row first - 1.
PACKATTN_DEVICE RowRange load_before(const TileTableTask& task, int64_t first) {
  if (first == 0 || first >= task.rows) return RowRange::clamped(0, 0, 0);
  return RowRange::clamped(ptx::load_global(task.begin + first - 1), ptx::load_global(task.end + first - 1),
                           task.limit);
}

// Bit k: row first + k is a border; bit 8 + k: it sees something and is none, so it goes on the run of the row before.
PACKATTN_DEVICE uint32_t borders_and_runs(const RowRange (&ranges)[kTileRowsPerThread], RowRange before) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < kTileRowsPerThread; ++k) {
    if (!ranges[k].empty()) bits |= ranges[k].borders(before) ? 1u << k : 256u << k;
    before = ranges[k];
  }
  return bits;
}

// Bit k: row first + k, if it is a border, starts a component of few rows. bits: of this thread's rows.
PACKATTN_DEVICE uint32_t starts_of_few(const TileTableTask& task, int64_t base, uint32_t bits, uint32_t shared) {
  static_assert(kTileRowsPerThread == 8 && kFewRows == 64);
  const uint32_t own = shared + kRuns + threadIdx.x * 4, past = blockDim.x * 4;
  ptx::sts32(own, bits >> 8);
  if (threadIdx.x < kFewRows / 8) {
    const int64_t first = base + (static_cast<int64_t>(blockDim.x) + threadIdx.x) * kTileRowsPerThread;
    RowRange ranges[kTileRowsPerThread];
    load_ranges(task, first, ranges);
    ptx::sts32(own + past, borders_and_runs(ranges, load_before(task, first)) >> 8);
  }
  ptx::block_sync();  // the scans that follow keep the next round's words from these
  uint32_t few = 0;
  if ((bits & 255) != 0) {
    uint64_t low = 0;  // whether rows first to first + 63 go on a run; high: the eight rows behind
#pragma unroll
    for (int i = 0; i < 8; ++i) low |= static_cast<uint64_t>(ptx::lds32(own + i * 4)) << 8 * i;
    const uint64_t high = ptx::lds32(own + 32);
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; ++k) {
      const uint64_t rows_behind = low >> (k + 1) | high << (63 - k);
      if (~rows_behind != 0) few |= 1u << k;
    }
  }
  return few;
}

PACKATTN_DEVICE void store_tile(const TileTableTask& task, const LastTile& tile, int32_t past) {
  const bool seen = tile.begin < tile.end;
  const int32_t row = tile.row < 0 ? ~tile.row : tile.row;
  ptx::store_global(task.table.scratch + (tile.started - 1),
                    Tile{tile.row, past - row, seen ? tile.begin : 0, seen ? tile.end : 0});
}

// Cuts the axis; writes the tiles in the order of their rows to table.scratch, with ~row for row if they belong into
// the table for few rows. Returns how many there are.
template <bool APART>
PACKATTN_DEVICE int32_t cut_into_tiles(const TileTableTask& task, uint32_t shared) {
  LastBorder borders = LastBorder::identity();  // of the rows before this round's
  LastTile tiles = LastTile::identity();
  const int64_t rows_per_round = static_cast<int64_t>(blockDim.x) * kTileRowsPerThread;
  for (int64_t base = 0; base < task.rows; base += rows_per_round) {
    const int64_t first = base + static_cast<int64_t>(threadIdx.x) * kTileRowsPerThread;
    RowRange ranges[kTileRowsPerThread];
    load_ranges(task, first, ranges);
    const uint32_t border = borders_and_runs(ranges, load_before(task, first));
    const uint32_t few_starts = APART ? starts_of_few(task, base, border, shared) : 0;
    LastBorder own = LastBorder::identity();
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; ++k) {
      if ((border >> k & 1u) != 0) own = LastBorder::at(static_cast<int32_t>(first + k), (few_starts >> k & 1u) != 0);
    }
    const Scanned<LastBorder> scanned = block_scan(own, shared + kBorderScan);
    const LastBorder last = borders.then(scanned.before);  // the component of row first - 1 starts there
    borders = borders.then(scanned.total);

    uint32_t starts = 0;  // bit k: a tile starts at row first + k
    uint32_t few = 0;     // bit k: that tile goes to the table for few rows
    int64_t since = first - last.component();
    bool in_few = APART && last.few() && since < kFewRows;
    int32_t left = in_few ? kFewRows - static_cast<int32_t>(since) : 0;  // rows that go on so
    if (APART && last.few() && !in_few) since -= kFewRows;
    int32_t tile_rows = in_few ? task.few_tile_rows : task.tile_rows;
    int32_t offset = static_cast<int32_t>(since % tile_rows);
    LastTile stretch = LastTile::identity();
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; ++k) {
      if ((border >> k & 1u) != 0 || offset == tile_rows) offset = 0;
      if constexpr (APART) {
        if ((border >> k & 1u) != 0) {
          in_few = (few_starts >> k & 1u) != 0;
          left = kFewRows;
        } else if (in_few && left == 0) {
          in_few = false;
        }
        tile_rows = in_few ? task.few_tile_rows : task.tile_rows;
        --left;
      }
      const bool starts_here = offset == 0 && first + k < task.rows;
      if (starts_here) starts |= 1u << k;
      if (starts_here && in_few) few |= 1u << k;
      const int32_t row = static_cast<int32_t>(first + k);
      stretch = stretch.then({starts_here ? 1 : 0, in_few ? ~row : row, ranges[k].begin, ranges[k].end});
      ++offset;
    }
    const Scanned<LastTile> placed = block_scan(stretch, shared + kTileScan);
    LastTile open = tiles.then(placed.before);  // what a tile that starts here ends
#pragma unroll
    for (int k = 0; k < kTileRowsPerThread; ++k) {
      const bool starts_here = (starts >> k & 1u) != 0;
      const int32_t row = static_cast<int32_t>(first + k);
      if (starts_here && row > 0) store_tile(task, open, row);
      const bool goes_to_few = (few >> k & 1u) != 0;
      open = open.then({starts_here ? 1 : 0, goes_to_few ? ~row : row, ranges[k].begin, ranges[k].end});
    }
    tiles = tiles.then(placed.total);
  }
  if (threadIdx.x == 0 && tiles.started > 0) store_tile(task, tiles, task.rows);
  return tiles.started;
}

// The most expensive tiles get the lowest number. A tile that sees nothing costs least.
PACKATTN_DEVICE int bucket_of(const Tile& tile) {
  const int32_t cost = tile.end - tile.begin;
  if (cost <= 0) return kBuckets - 1;
  constexpr int kFraction = 20;   // bits dropped of a float's 23
  constexpr int kOne = 127 << 3;  // what 1.f leaves
  const int level = static_cast<int>(ptx::fbits(static_cast<float>(cost)) >> kFraction) - kOne;  // 0 to 248
  return kBuckets - 2 - level;
}

// Where each tile of a warp's stretch goes: calls place(bucket, same, rank, tile) for every tile that goes to this
// table, with `same` the lanes whose tile is in the same bucket and `rank` how many of them are below this lane. All
// lanes take part in each round; those without a tile have none in `same`.
template <bool FEW, class Place>
PACKATTN_DEVICE void for_each_tile(const TileTableTask& task, int32_t count, const Place& place) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = static_cast<int64_t>(threadIdx.x) / kWarp;
  const int64_t warps = static_cast<int64_t>(blockDim.x) / kWarp;
  const int32_t first = static_cast<int32_t>(count * warp / warps);
  const int32_t past = static_cast<int32_t>(count * (warp + 1) / warps);
  for (int32_t base = first; base < past; base += kWarp) {
    bool valid = base < past - lane;
    Tile tile{0, 0, 0, 0};
    if (valid) tile = ptx::load_global(task.table.scratch + base + lane);
    valid = valid && (tile.row < 0) == FEW;
    if (FEW) tile.row = ~tile.row;
    const int bucket = bucket_of(tile);
    uint32_t same = ptx::ballot(valid);
#pragma unroll
    for (int bit = 1; bit < kBuckets; bit *= 2) {
      const uint32_t set = ptx::ballot((bucket & bit) != 0);
      same &= (bucket & bit) != 0 ? set : ~set;
    }
    if (!valid) same = 0;
    place(bucket, same, ptx::popc(same & ((1u << lane) - 1)), tile);
  }
}

// Sorts by bucket what of task.table.scratch belongs into this table, and counts it.
template <bool FEW>
PACKATTN_DEVICE void sort_tiles(const TileTableTask& task, int32_t count, uint32_t shared) {
  const TileTable& table = FEW ? task.few : task.table;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const auto counter = [&](int bucket) {
    return shared + static_cast<uint32_t>(kBucketCounts + (bucket * warps + warp) * 4);
  };
  // Every thread sums up kOwn counters that follow each other: all buckets of all warps are kOwn * blockDim.x.
  constexpr int kOwn = kBuckets / kWarp;
  const uint32_t own = shared + static_cast<uint32_t>(kBucketCounts + static_cast<int>(threadIdx.x) * kOwn * 4);

#pragma unroll
  for (int i = 0; i < kOwn; ++i) ptx::sts32(own + 4 * i, 0);
  ptx::block_sync();  // counters are 0, and the tiles are in scratch
  for_each_tile<FEW>(task, count, [&](int bucket, uint32_t same, int rank, const Tile&) {
    if (same != 0 && rank == 0) {  // one lane for each bucket
      ptx::sts32(counter(bucket), ptx::lds32(counter(bucket)) + static_cast<uint32_t>(ptx::popc(same)));
    }
    ptx::warp_sync();
  });
  ptx::block_sync();

  int32_t counts[kOwn];
  Sum sum = Sum::identity();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    counts[i] = static_cast<int32_t>(ptx::lds32(own + 4 * i));
    sum.value += counts[i];
  }
  const Scanned<Sum> scanned = block_scan(sum, shared + kBorderScan);
  if (threadIdx.x == 0) ptx::store_global(table.count, scanned.total.value);
  int32_t position = scanned.before.value;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    ptx::sts32(own + 4 * i, static_cast<uint32_t>(position));
    position += counts[i];
  }
  ptx::block_sync();

  for_each_tile<FEW>(task, count, [&](int bucket, uint32_t same, int rank, const Tile& tile) {
    uint32_t start = 0;
    if (same != 0) {
      start = ptx::lds32(counter(bucket));
      ptx::store_global(table.tiles + start + rank, tile);
    }
    ptx::warp_sync();  // everybody has read
    if (same != 0 && rank == 0) ptx::sts32(counter(bucket), start + static_cast<uint32_t>(ptx::popc(same)));
    ptx::warp_sync();
  });
}

// APART: components of few rows go to a table of their own.
template <bool APART>
__global__ void __launch_bounds__(1024) tile_table_kernel(TileTableTask task) {
  const uint32_t shared = ptx::smem_base();
  const int32_t count = cut_into_tiles<APART>(task, shared);
  sort_tiles<false>(task, count, shared);
  if constexpr (APART) {
    ptx::block_sync();  // the counters are free
    sort_tiles<true>(task, count, shared);
  }
}

}  // namespace packattn::cuda
