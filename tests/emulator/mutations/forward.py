"""Breaks of the tensor-core forward at head dim 64: three slots in the ring, queries in registers."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["forward_driver.cpp"]
ARGUMENTS = ["20"]
FLAGS = ["-DFORWARD_DRIVER_ONLY=64,64"]
KERNEL = "csrc/cuda/attention_forward.cuh"
TILE = "csrc/cuda/mma_tile.cuh"

MUTATIONS = [
    Mutation(
        "no barrier between items", KERNEL, "    ptx::block_sync();  // everybody is done", "    // everybody is done"
    ),
    Mutation("no barrier before Q", KERNEL, "      ptx::block_sync();  // Q and the first keys", "      // Q and"),
    Mutation("no barrier before values", KERNEL, "      ptx::block_sync();  // the values", "      // the values"),
    Mutation(
        "no barrier before keys", KERNEL, "        ptx::block_sync();  // the next keys", "        // the next keys"
    ),
    Mutation("ranges read before the warp has written them", KERNEL, "lane);\n    ptx::warp_sync();", "lane);"),
    Mutation(
        "rows read back before they are staged", TILE, "  ptx::warp_sync();\n  const int column", "  const int column"
    ),
    Mutation(
        "first wait too lax",
        KERNEL,
        "      ptx::cp_async_wait<AHEAD - 1>();\n      ptx::block_sync();  // Q",
        "      ptx::cp_async_wait<AHEAD>();\n      ptx::block_sync();  // Q",
    ),
    Mutation(
        "wait for values too lax",
        KERNEL,
        "      ptx::cp_async_wait<AHEAD - 1>();\n      ptx::block_sync();  // the values",
        "      ptx::cp_async_wait<AHEAD>();\n      ptx::block_sync();  // the values",
    ),
    Mutation(
        "wait for keys too lax",
        KERNEL,
        "        ptx::cp_async_wait<AHEAD - 1>();\n        ptx::block_sync();  // the next",
        "        ptx::cp_async_wait<AHEAD>();\n        ptx::block_sync();  // the next",
    ),
    Mutation(
        "no group where nothing is copied",
        KERNEL,
        "      }\n      ptx::cp_async_commit();\n    };",
        "      }\n      if (left > 0) ptx::cp_async_commit();\n    };",
    ),
    Mutation("ring turned by the wrong slot", KERNEL, "slots[SLOTS - 2] = slot0;", "slots[SLOTS - 2] = slot1;"),
    Mutation("ring not turned", KERNEL, "slots[i] = slots[i + 2];", "slots[i] = slots[i];"),
    Mutation(
        "copies into the keys in use",
        KERNEL,
        "integral_constant<int, AHEAD>(), slots[AHEAD]",
        "integral_constant<int, AHEAD>(), slots[0]",
    ),
    Mutation("copies into the values in use", KERNEL, "AHEAD + 1>(), slots[0]", "AHEAD + 1>(), slots[1]"),
    Mutation("values read from the keys' slot", KERNEL, "value_lane + slots[1]", "value_lane + slots[0]"),
    Mutation("keys read from the values' slot", KERNEL, "q, key_lane + slots[0]", "q, key_lane + slots[1]"),
    Mutation("shared memory too small", KERNEL, "kRanges + kRows * 8", "kRanges + kRows * 4"),
    Mutation("copies ahead do not count what is ahead", KERNEL, "end - first_key - ahead / 2 * BN", "end - first_key"),
    Mutation("one row too many read", TILE, "row + i * STEP < valid", "row + i * STEP <= valid"),
    Mutation(
        "last row of a full block not tested", TILE, "if (valid >= ROWS && source", "if (valid >= ROWS - 1 && source"
    ),
    Mutation(
        "one column chunk too many read",
        TILE,
        "(column + j * G) * 8 < source.dim",
        "(column + j * G) * 8 <= source.dim",
    ),
    Mutation("padded columns read", TILE, "valid >= ROWS && source.dim == PITCH", "valid >= ROWS", NUMBERS),
    Mutation(
        "rows past the range kept",
        TILE,
        "ok ? from + j * G * 8 : source.any, ok",
        "ok ? from + j * G * 8 : source.any, true",
        NUMBERS,
    ),
    Mutation(
        "zero-fill names no address",
        TILE,
        "ok ? from + j * G * 8 : source.any, ok",
        "ok ? from + j * G * 8 : nullptr, ok",
    ),
    Mutation(
        "queries of others read",
        KERNEL,
        "copy_rows<D, Shape::kRows, THREADS>(base, queries, tile.rows)",
        "copy_rows<D, Shape::kRows, THREADS>(base, queries, Shape::kRows)",
    ),
    Mutation(
        "ranges read past the rows",
        TILE,
        "    if (row < rows) {\n      b = ptx",
        "    if (row <= rows) {\n      b = ptx",
    ),
    Mutation("ranges not cut below", TILE, "b = b < low ? low : b;", "", NUMBERS),
    Mutation("ranges not cut above", TILE, "e = e > high ? high : e;", "", NUMBERS),
    Mutation(
        "rows stored past the tile", TILE, "if (row < rows && (column + j) * 8 < dim)", "if ((column + j) * 8 < dim)"
    ),
    Mutation("columns stored past the head", TILE, "if (row < rows && (column + j) * 8 < dim)", "if (row < rows)"),
    Mutation("lse stored past the tile", KERNEL, "lane % 4 == 0 && row < rows", "lane % 4 == 0"),
    Mutation(
        "swizzle on the way in only",
        TILE,
        "const int key = G == 8 ? row & 7 : row >> 1 & 3;\n  return static_cast<uint32_t>(row * PITCH",
        "const int key = 0;\n  return static_cast<uint32_t>(row * PITCH",
    ),
    Mutation(
        "swizzle taken back wrong",
        TILE,
        "source.to / 16 % (PITCH / 8)) ^ (G == 8 ? row & 7",
        "source.to / 16 % (PITCH / 8)) ^ (G == 8 ? row & 3",
    ),
    Mutation("columns step by half", TILE, "step % S * 32)", "step % S * 16)", NUMBERS),
    Mutation(
        "operand B addressed like A", TILE, "lane % 8 + lane / 16 * 8, lane / 8 % 2", "lane % 16, lane / 16", NUMBERS
    ),
    Mutation("values not transposed", TILE, "ptx::ldmatrix_x4_trans(bf", "ptx::ldmatrix_x4(bf", NUMBERS),
    Mutation(
        "key heads dealt out in turn",
        KERNEL,
        "head / (task.heads_q / task.heads_k), first_key, task.head_dim, thread",
        "head % task.heads_k, first_key, task.head_dim, thread",
        NUMBERS,
    ),
    Mutation("an item twice, another never", KERNEL, ": 2 * (blocks - block) - 1;", ": 2 * (blocks - block);", NUMBERS),
    Mutation("rounds do not turn", KERNEL, "+ (turn % 2 == 0)", "+ turn % 2"),
    Mutation("mask one key late", TILE, "n * 8 + j < begin ||", "n * 8 + j <= begin ||", NUMBERS),
    Mutation("mask one key long", TILE, "n * 8 + j >= end)", "n * 8 + j > end)", NUMBERS),
    Mutation("first block skipped", KERNEL, "span.some_begin - BN", "span.some_begin - BN + 1", NUMBERS),
    Mutation("last block skipped", KERNEL, "span.some_end - 1", "span.some_end - 2", NUMBERS),
    Mutation("full one key early", KERNEL, "span.full_begin - 1", "span.full_begin - 2", NUMBERS),
    Mutation("full one key late", KERNEL, "span.full_end - BN;", "span.full_end - BN + 1;", NUMBERS),
    Mutation("out not rescaled", KERNEL, "o[i][n][2 * r] *= correction;", "", NUMBERS),
    Mutation("sum not rescaled", KERNEL, "        l[i][r] *= correction;\n", "", NUMBERS),
    Mutation(
        "reference does not follow",
        KERNEL,
        "m[i][r] = grown ? top[i][r] : m[i][r];",
        "m[i][r] = grown && m[i][r] < -1e30f ? top[i][r] : m[i][r];",
        NUMBERS,
    ),
    Mutation(
        "correction upside down", KERNEL, "ptx::ex2(m[i][r] - top[i][r])", "ptx::ex2(top[i][r] - m[i][r])", NUMBERS
    ),
    Mutation("maximum of half the row", KERNEL, "      x = fmaxf(x, ptx::shfl_xor(x, 2));\n", "", NUMBERS),
    Mutation("sum of half the row", KERNEL, "      sum += ptx::shfl_xor(sum, 2);\n", "", NUMBERS),
    Mutation(
        "starts from 0",
        KERNEL,
        "constexpr float kLowest = -3.402823466e38f;",
        "constexpr float kLowest = 0.f;",
        NUMBERS,
    ),
    Mutation("another row's reference", KERNEL, "factor - m[i][j / 2]);", "factor - m[i][j % 2]);", NUMBERS),
    Mutation(
        "out divided without the sink's weight",
        KERNEL,
        "      weight *= ptx::rcp(sum);",
        "      weight = ptx::rcp(sum);",
        NUMBERS,
    ),
    Mutation("small sink left out", KERNEL, "sum += ptx::ex2(sink - reference);", "", NUMBERS),
    Mutation("sink of another head", KERNEL, "task.sinks + head", "task.sinks + head / 2", NUMBERS),
    Mutation("empty rows get what they summed", KERNEL, "ptx::fint(range.x) < ptx::fint(range.y);", "true;", NUMBERS),
    Mutation(
        "soft cap without its scale",
        KERNEL,
        "2.f * tile::kLog2e * (task.scale / task.softcap)",
        "2.f * (task.scale / task.softcap)",
        NUMBERS,
    ),
    Mutation("tanh without its factor", TILE, "fmaf(-2.f, ptx::rcp", "fmaf(-1.f, ptx::rcp", NUMBERS),
    Mutation("slots overlap", KERNEL, "SLOTS % 2 ? i * kLarger", "SLOTS % 2 ? i * kLarger / 2"),
    Mutation(
        "some row sees: of the last to begin",
        TILE,
        "span.some_begin = ptx::reduce_min(",
        "span.some_begin = ptx::reduce_max(",
        NUMBERS,
    ),
    Mutation(
        "some row sees: of the first to end",
        TILE,
        "span.some_end = ptx::reduce_max(",
        "span.some_end = ptx::reduce_min(",
        NUMBERS,
    ),
    Mutation(
        "all rows see: of the first to begin",
        TILE,
        "span.full_begin = ptx::reduce_max(",
        "span.full_begin = ptx::reduce_min(",
        NUMBERS,
    ),
    Mutation(
        "all rows see: of the last to end",
        TILE,
        "span.full_end = ptx::reduce_min(",
        "span.full_end = ptx::reduce_max(",
        NUMBERS,
    ),
    Mutation(
        "swizzle missing on the way in",
        TILE,
        "source.to = chunk_at<PITCH>(thread / G, thread % G);",
        "source.to = static_cast<uint32_t>(thread / G * PITCH * 2 + thread % G * 16);",
        NUMBERS,
    ),
]
