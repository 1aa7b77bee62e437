"""Breaks of the tensor-core backward at head dim 64: a warp has its keys (rows) to itself."""

from mutation import NUMBERS, REPORT, Mutation

PROGRAMS = ["backward_driver.cpp"]
ARGUMENTS = ["8"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=64,64"]
KEYS = "csrc/cuda/attention_backward.cuh"
QUERY = "csrc/cuda/attention_backward_query.cuh"
STATS = "csrc/cuda/attention_backward_stats.cuh"
COMMON = "csrc/cuda/attention_backward_common.cuh"
TILE = "csrc/cuda/mma_tile.cuh"

MUTATIONS = [
    # Barriers and waits
    Mutation("keys: no barrier between tiles", KEYS, "  ptx::block_sync();  // B0", "  // B0"),
    Mutation("keys: no barrier before the keys are read", KEYS, "  ptx::block_sync();  // B1", "  // B1"),
    Mutation("keys: no barrier between buffers", KEYS, "    ptx::block_sync();  // B2", "    // B2"),
    Mutation("keys: first wait too lax", KEYS, "ptx::cp_async_wait<1>();", "ptx::cp_async_wait<2>();"),
    Mutation(
        "keys: wait for rows too lax",
        KEYS,
        "    ptx::cp_async_wait<0>();\n    ptx::block_sync();  // B2",
        "    ptx::cp_async_wait<1>();\n    ptx::block_sync();  // B2",
    ),
    Mutation("query: no barrier between tiles", QUERY, "  ptx::block_sync();  // B0", "  // B0"),
    Mutation("query: no barrier before the rows are read", QUERY, "  ptx::block_sync();  // B1", "  // B1"),
    Mutation("query: no barrier between buffers", QUERY, "    ptx::block_sync();  // B2", "    // B2"),
    Mutation(
        "query: wait for keys too lax",
        QUERY,
        "    ptx::cp_async_wait<0>();\n    ptx::block_sync();  // B2",
        "    ptx::cp_async_wait<1>();\n    ptx::block_sync();  // B2",
    ),
    # Masks, skips and what is not masked
    Mutation(
        "keys: skips a slice too many at its end", KEYS, "slice >= span.some_end", "slice >= span.some_end - 1", NUMBERS
    ),
    Mutation(
        "keys: skips a slice too many at its begin",
        KEYS,
        "slice + SLICE <= span.some_begin",
        "slice + SLICE <= span.some_begin + 1",
        NUMBERS,
    ),
    Mutation(
        "keys: one query too many unmasked at the end",
        KEYS,
        "mine + PART <= span.full_end)",
        "mine + PART <= span.full_end + 1)",
        NUMBERS,
    ),
    Mutation(
        "keys: one query too many unmasked at the begin",
        KEYS,
        "mine >= span.full_begin",
        "mine >= span.full_begin - 1",
        NUMBERS,
    ),
    Mutation("keys: mask of the slice before", KEYS, "ranges, mine, 0.f", "ranges, mine - 1, 0.f", NUMBERS),
    Mutation(
        "query: skips a slice too many at its end",
        QUERY,
        "slice >= span.some_end",
        "slice >= span.some_end - 1",
        NUMBERS,
    ),
    Mutation(
        "query: one key too many unmasked at the end",
        QUERY,
        "mine + S::kPart <= span.full_end)",
        "mine + S::kPart <= span.full_end + 1)",
        NUMBERS,
    ),
    Mutation(
        "query: one key too many unmasked at the begin",
        QUERY,
        "mine >= span.full_begin",
        "mine >= span.full_begin - 1",
        NUMBERS,
    ),
    # Other documents
    Mutation(
        "keys: rows past the tile's range are copied",
        KEYS,
        "valid = keys.end - row;",
        "valid = keys.end - row + 1;",
        NUMBERS,
    ),
    Mutation(
        "keys: statistics past the tile's range are copied",
        KEYS,
        "thread < valid ? stats : task.scratch,\n                     thread < valid)",
        "stats, true)",
        REPORT,
    ),
    Mutation(
        "query: keys past the tile's range are copied",
        QUERY,
        "value, rows.end - row)",
        "value, rows.end - row + 1)",
        NUMBERS,
    ),
    Mutation("keys: rows seen by nobody not cleared", KEYS, "  clear_empty_rows(dk, ranges, lane);\n", "", NUMBERS),
    Mutation("query: rows that see nothing not cleared", QUERY, "  clear_empty_rows(dq, ranges, lane);\n", "", NUMBERS),
    Mutation(
        "statistics of rows that see nothing",
        STATS,
        "      if (sees) {\n        stats.x",
        "      if (true) {\n        stats.x",
        NUMBERS,
    ),
    # What is summed
    Mutation(
        "keys: heads of the group not walked", KEYS, "      ++next_head;\n", "      next_head = past_head;\n", NUMBERS
    ),
    Mutation(
        "keys: queries from another head",
        KEYS,
        "      if (WALK && next_head < past_head) seek",
        "      if (false) seek",
        REPORT,
    ),
    Mutation(
        "keys: begins at an even row",
        KEYS,
        "int row = keys.begin, query_head",
        "int row = keys.begin & ~1, query_head",
        NUMBERS,
    ),
    Mutation("keys: buffers not alternated", KEYS, "buffer ^= 1;", "buffer ^= 0;", NUMBERS),
    Mutation(
        "keys: statistics of the other buffer",
        KEYS,
        "(buffer * ROWS + from + lane",
        "((buffer ^ 1) * ROWS + from + lane",
        REPORT,
    ),
    Mutation("keys: gradient without delta", COMMON, "  dp -= stats.y;\n", "", NUMBERS),
    Mutation("keys: dK not scaled", KEYS, "(dk, task.scale,", "(dk, 1.f,", NUMBERS),
    Mutation(
        "keys: one row too many stored",
        KEYS,
        "task.dkey.row_stride, keys.rows - own,",
        "task.dkey.row_stride, keys.rows - own + 1,",
        NUMBERS,
    ),
    Mutation(
        "query: padded columns stored",
        QUERY,
        "rows.rows - own, task.head_dim - part * S::kColumns",
        "rows.rows - own, D",
        REPORT,
    ),
    Mutation(
        "query: the key head of another group",
        QUERY,
        "head / (task.heads_q / task.heads_k)",
        "head % task.heads_k",
        NUMBERS,
    ),
    Mutation(
        "query: the last step of keys in registers left out",
        KEYS,
        "if constexpr (KEY_STEPS < D / 16)",
        "if constexpr (KEY_STEPS == 0)",
        NUMBERS,
    ),
    Mutation("no derivative of the soft cap", COMMON, "    dp *= 1.f - t * t;\n", "", NUMBERS),
    Mutation("gradient of lse not in delta", STATS, "task.dlse == nullptr ? delta", "true ? delta", NUMBERS),
    Mutation("lse in other units", STATS, "(task.lse + item) * tile::kLog2e", "(task.lse + item)", NUMBERS),
    Mutation("sum of a row over too few lanes", STATS, "mask < kStatsLanes;", "mask < kStatsLanes / 2;", NUMBERS),
    Mutation(
        "sinks: no barrier before the warps' sums are read",
        STATS,
        "  ptx::block_sync();\n  if (warp == 0)",
        "  if (warp == 0)",
    ),
    Mutation("sinks: wrong sign", STATS, "task.dsinks + head, -sum", "task.dsinks + head, sum", NUMBERS),
    Mutation("sinks: rows left out", STATS, "row += THREADS", "row += 2 * THREADS", NUMBERS),
    # Memory
    Mutation(
        "keys: shared memory too small",
        KEYS,
        "kExchange = kRanges + WARPS * kWarpKeys * 8",
        "kExchange = kRanges + WARPS * kWarpKeys * 4",
    ),
    Mutation(
        "query: shared memory too small", QUERY, "kRanges + WARPS * kWarpRows * 8", "kRanges + WARPS * kWarpRows * 4"
    ),
    Mutation(
        "items: the last block's heads skipped",
        COMMON,
        "if (head >= heads) ++index",
        "if (head >= heads) index += 2",
        NUMBERS,
    ),
    Mutation(
        "rows read back before they are staged", TILE, "  ptx::warp_sync();\n  const int column", "  const int column"
    ),
]
