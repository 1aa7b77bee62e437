"""Breaks of the plain attention kernels: barriers, zero-fill, masks, the online softmax, gradients."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["attention_plain_test.cpp"]
ARGUMENTS = ["2"]
KERNEL = "csrc/cuda/attention_plain.cuh"
BACKWARD = "csrc/cuda/attention_plain_backward.cuh"
HOST = "csrc/cuda/attention_plain.cu"

LOADED = "    ptx::block_sync();\n#pragma unroll 1\n    for (int k = 0; k < kDepth; k += 4)"

MUTATIONS = [
    Mutation(
        "operands are read before they are there", KERNEL, LOADED, LOADED.removeprefix("    ptx::block_sync();\n")
    ),
    Mutation(
        "operands are overwritten in use",
        KERNEL,
        "    ptx::block_sync();  // what was in shared memory has been used\n    load_tile<T, kDepth",
        "    load_tile<T, kDepth",
    ),
    Mutation(
        "columns are read before they are there", KERNEL, "  ptx::block_sync();\n  clear(product);", "  clear(product);"
    ),
    Mutation(
        "columns take the operands' place in use",
        KERNEL,
        "  ptx::block_sync();  // what was in shared memory has been used\n  load_tile<T, kTile",
        "  load_tile<T, kTile",
    ),
    Mutation("P is overwritten in use", BACKWARD, "      ptx::block_sync();  // P has been used\n", ""),
    Mutation(
        "facts of rows are overwritten in use",
        BACKWARD,
        "      ptx::block_sync();  // the facts of the rows before have been used\n",
        "",
    ),
    Mutation(
        "too little shared memory",
        HOST,
        "plain::kThreads, plain::kForwardShared, task",
        "plain::kThreads, plain::kForwardShared - 32, task",
    ),
    Mutation(
        "rows past the tile are loaded", KERNEL, "at < rows ? columns - column - c : 0", "columns - column - c", NUMBERS
    ),
    Mutation("columns past the last are loaded", KERNEL, "if (aligned && exist >= 4)", "if (aligned)"),
    Mutation("wide loads from any address", KERNEL, "if (aligned && exist >= 4)", "if (exist >= 4)"),
    Mutation("columns past the last are stored", KERNEL, "if (at < columns) store_element", "store_element"),
    Mutation("rows past the last are stored", KERNEL, "    if (r >= rows) continue;\n", "", NUMBERS),
    Mutation("masked weights are multiplied", KERNEL, "if (MASKED && (seen >> i & 1u) == 0) continue;", "", NUMBERS),
    Mutation(
        "mask off by one at the end",
        KERNEL,
        "begin[i] <= key && key < end[i]",
        "begin[i] <= key && key <= end[i]",
        NUMBERS,
    ),
    Mutation(
        "mask off by one at the begin",
        KERNEL,
        "begin[i] <= key && key < end[i]",
        "begin[i] < key && key < end[i]",
        NUMBERS,
    ),
    Mutation("a block is whole a key too early", KERNEL, "key + kTile <= end[i]", "key + kTile <= end[i] + 1", NUMBERS),
    Mutation("a block is whole before the range", KERNEL, "all = all && begin[i] <= key &&", "all = all &&", NUMBERS),
    Mutation(
        "blocks of keys start at multiples of 64",
        KERNEL,
        "for (int32_t key = tile.begin;",
        "for (int32_t key = tile.begin / kTile * kTile;",
        NUMBERS,
    ),
    Mutation(
        "what was summed is not rescaled", KERNEL, "out[g][i][c] * rescale[i] + block", "out[g][i][c] + block", NUMBERS
    ),
    Mutation("the sum is not rescaled", KERNEL, "sum[i] * rescale[i] + sum_of_row", "sum[i] + sum_of_row", NUMBERS),
    Mutation(
        "maximum of half a row",
        KERNEL,
        "for (int mask = 1; mask < kSide; mask *= 2) v = fmaxf",
        "for (int mask = 1; mask < kSide / 2; mask *= 2) v = fmaxf",
        NUMBERS,
    ),
    Mutation(
        "rows that see nothing keep what was summed",
        KERNEL,
        "rows.sees(i) ? out[g][i][c] * factor[i] : 0.f",
        "out[g][i][c] * factor[i]",
        NUMBERS,
    ),
    Mutation(
        "lse without the mask",
        KERNEL,
        "rows.sees(i) ? top[i] + logf(sum[i]) : -INFINITY",
        "top[i] + logf(sum[i])",
        NUMBERS,
    ),
    Mutation(
        "infinite sinks give NaN",
        KERNEL,
        "(sink == highest ? 1.f : expf(sink - highest))",
        "expf(sink - highest)",
        NUMBERS,
    ),
    Mutation("every query head has a key head", KERNEL, "item.head / (p.heads_q / p.heads_k)", "item.head", NUMBERS),
    Mutation("only the first item of a block", KERNEL, "n < items; n += gridDim.x", "n < items; n += items", NUMBERS),
    Mutation("one slice of the columns", KERNEL, "(columns + slice_columns - 1) / slice_columns", "1", NUMBERS),
    Mutation("dlse dropped", BACKWARD, "if (p.dlse != nullptr) sum -=", "if (false) sum -=", NUMBERS),
    Mutation(
        "delta of half a row",
        BACKWARD,
        "for (int mask = 1; mask < kWarp; mask *= 2) sum",
        "for (int mask = 1; mask < kWarp / 2; mask *= 2) sum",
        NUMBERS,
    ),
    Mutation("slope of the soft cap dropped", BACKWARD, "slope = 1.f - t * t;", "", NUMBERS),
    Mutation("sinks of rows that see nothing", BACKWARD, "    if (!sees_anything(p, row)) continue;\n", "", NUMBERS),
    Mutation("sign of dsinks", BACKWARD, "0.0 - total", "total", NUMBERS),
    Mutation("the wrong half of the votes", BACKWARD, ">> half & 0xFFFFu", "& 0xFFFFu", NUMBERS),
    Mutation(
        "rows past the last see padding keys",
        BACKWARD,
        "RowFacts facts{INT_MAX, 0,",
        "RowFacts facts{0, INT_MAX,",
        NUMBERS,
    ),
    Mutation(
        "one query head of a group", BACKWARD, "head < (item.head + 1) * group", "head < item.head * group + 1", NUMBERS
    ),
    Mutation("dK without the scale", BACKWARD, "    scale_by(dkey[g], p.scale);\n", "", NUMBERS),
    Mutation("dK and dV swapped", BACKWARD, "      store_weights(dp);\n", "      store_weights(s);\n", NUMBERS),
    Mutation(
        "keys' table built from the rows' ranges",
        HOST,
        "build_tile_table(parts.query_begin, parts.query_end, task.total_k",
        "build_tile_table(task.key_begin, task.key_end, task.total_k",
        NUMBERS,
    ),
]
