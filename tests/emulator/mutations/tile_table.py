"""Breaks of the tile table: what a component is, the scans, the sort."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["tile_table_test.cpp"]
KERNEL = "csrc/cuda/tile_table.cuh"
SCAN = "csrc/cuda/scan.cuh"
RANGE = "csrc/cuda/row_range.cuh"

MUTATIONS = [
    Mutation("touching documents make one component", RANGE, "begin >= before.end;", "begin > before.end;", NUMBERS),
    Mutation("an empty row keeps its ends", RANGE, "RowRange{INT_MAX, 0}", "RowRange{first, last}", NUMBERS),
    Mutation("end not clamped", RANGE, "end > limit ? limit : end", "end", NUMBERS),
    Mutation("begin not clamped", RANGE, "begin < 0 ? 0 : begin", "begin", NUMBERS),
    Mutation("the first row ends a tile", KERNEL, "if (starts_here && row > 0)", "if (starts_here)"),
    Mutation("the last tile is not written", KERNEL, "threadIdx.x == 0 && tiles.started > 0", "false", NUMBERS),
    Mutation("tiles a row too long", KERNEL, "offset == tile_rows)", "offset > tile_rows)", NUMBERS),
    Mutation(
        "rows past the end are loaded",
        KERNEL,
        "task.vector_loads && first + kTileRowsPerThread <= task.rows",
        "task.vector_loads && first < task.rows",
    ),
    Mutation("vector loads from any address", KERNEL, "if (task.vector_loads && first", "if (first"),
    Mutation("borders of earlier rounds are forgotten", KERNEL, "borders = borders.then(scanned.total);", "", NUMBERS),
    Mutation(
        "the tile that goes on from round to round is cut",
        KERNEL,
        "tiles = tiles.then(placed.total);",
        "tiles = placed.total;",
        NUMBERS,
    ),
    Mutation(
        "barrier before the sort removed",
        KERNEL,
        "  ptx::block_sync();  // counters are 0, and the tiles are in scratch\n",
        "",
    ),
    Mutation(
        "counters are read before all are written",
        KERNEL,
        "    ptx::warp_sync();\n  });\n  ptx::block_sync();\n",
        "    ptx::warp_sync();\n  });\n",
    ),
    Mutation(
        "a counter goes up before all lanes have read it", KERNEL, "    ptx::warp_sync();  // everybody has read\n", ""
    ),
    Mutation("tiles of a class on one place", KERNEL, "table.tiles + start + rank", "table.tiles + start"),
    Mutation("shortest first", KERNEL, "return kBuckets - 2 - level;", "return level;", NUMBERS),
    # ---- components of few rows
    Mutation(
        "barrier after the runs removed",
        KERNEL,
        "  ptx::block_sync();  // the scans that follow",
        "  // the scans that",
    ),
    Mutation("runs of the next round left out", KERNEL, "threadIdx.x < kFewRows / 8", "threadIdx.x < kFewRows / 8 - 1"),
    Mutation(
        "runs a row too short", KERNEL, "low >> (k + 1) | high << (63 - k)", "low >> k | high << (64 - k)", NUMBERS
    ),
    Mutation(
        "runs of eight rows less", KERNEL, "if (~rows_behind != 0)", "if (~(rows_behind | 255ull << 56) != 0)", NUMBERS
    ),
    Mutation(
        "few rows not carried on",
        KERNEL,
        "(static_cast<uint32_t>(row) + 1) + few}",
        "(static_cast<uint32_t>(row) + 1)}",
        NUMBERS,
    ),
    Mutation("padding counts as rows", KERNEL, "if (!ranges[k].empty()) bits |= ranges", "bits |= ranges", NUMBERS),
    Mutation(
        "padding stays with few rows", KERNEL, "} else if (in_few && left == 0) {", "} else if (false) {", NUMBERS
    ),
    Mutation("padding cut from the border", KERNEL, "!in_few) since -= kFewRows;", "!in_few) since -= 0;", NUMBERS),
    Mutation(
        "few rows cut like many",
        KERNEL,
        "int32_t tile_rows = in_few ? task.few_tile_rows",
        "int32_t tile_rows = false ? task.few_tile_rows",
        NUMBERS,
    ),
    Mutation("every tile in both tables", KERNEL, "valid = valid && (tile.row < 0) == FEW;", "", NUMBERS),
    Mutation("barrier between the sorts removed", KERNEL, "    ptx::block_sync();  // the counters are free\n", ""),
    Mutation("barrier of a scan removed", SCAN, "  ptx::block_sync();\n  T warp_total", "  T warp_total"),
    Mutation("a scan in the wrong order", SCAN, "value = below.then(value);", "value = value.then(below);", NUMBERS),
    Mutation("warps before are left out", SCAN, "if (warp > 0) result.before", "if (warp > 1) result.before", NUMBERS),
]
