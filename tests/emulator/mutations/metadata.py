"""Breaks of the metadata kernels: boundaries, capacities, scans over several blocks, binary searches."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["metadata_test.cpp"]
KERNEL = "csrc/cuda/metadata.cuh"
HOST = "csrc/cuda/metadata.cu"
SCAN = "csrc/cuda/scan.cuh"

MUTATIONS = [
    Mutation("a scan overwrites the one before", SCAN, "  ptx::block_sync();  // the next scan may write there\n", ""),
    Mutation(
        "spans before a block's own are left out", KERNEL, "threadIdx.x < blockIdx.x ? one", "false ? one", NUMBERS
    ),
    Mutation("the total is the block's own", KERNEL, "if (gridDim.x == 1) total = end;", "total = end;", NUMBERS),
    Mutation(
        "rounds of a block forget the one before",
        KERNEL,
        "carry = carry.then(scanned.total);",
        "carry = scanned.total;",
        NUMBERS,
    ),
    Mutation("more spans than threads", HOST, "(rounds + kMaxSpans - 1) / kMaxSpans", "1", NUMBERS),
    Mutation(
        "entries past the capacity are written",
        KERNEL,
        "if (own.count > 0 && before.count <= max_segments)",
        "if (own.count > 0)",
    ),
    Mutation("documents past the capacity are written", KERNEL, "if (document >= max_segments) return;", ""),
    Mutation("one entry too few", KERNEL, "before.count <= max_segments", "before.count < max_segments", NUMBERS),
    Mutation("trailing padding is a segment", KERNEL, "total.last < count ? 1 : 0", "0", NUMBERS),
    Mutation(
        "a row's end cuts padding", KERNEL, "(tokens.starts_row(t) && !padding(value))", "tokens.starts_row(t)", NUMBERS
    ),
    Mutation(
        "rows run on into the next",
        KERNEL,
        "t + 1 == tokens.total || tokens.starts_row(t + 1)",
        "t + 1 == tokens.total",
        NUMBERS,
    ),
    Mutation(
        "positions that stand still go on",
        KERNEL,
        "position <= before || position - 1 != before",
        "position < before || (position != before && position - 1 != before)",
        NUMBERS,
    ),
    Mutation("an entry before the first", KERNEL, "(entry < 0 ? 0 : entry)", "entry"),
    Mutation(
        "offsets not clamped",
        KERNEL,
        "clamped(ptx::load_global(cu + (entry < 0 ? 0 : entry)), 0, total)",
        "ptx::load_global(cu + entry)",
    ),
    Mutation(
        "the binary search looks one entry past",
        KERNEL,
        "int64_t high = count;\n  while (low < high)",
        "int64_t high = count + 1;\n  while (low < high)",
    ),
    Mutation(
        "tokens past the last offset are in a document", KERNEL, "inside = entry + 1 < count", "inside = true", NUMBERS
    ),
    Mutation("top-left aligned", KERNEL, "end - (end_q - t)", "begin + t", NUMBERS),
    Mutation("window off by one", KERNEL, "center - task.left", "center - task.left + 1", NUMBERS),
    Mutation("a chunk before the document", KERNEL, "task.chunk > 0 && center >= first", "task.chunk > 0", NUMBERS),
    Mutation("rows that see nothing are searched", KERNEL, "return {sees(i) ? 1 : 0, 0};", "return {1, 0};", NUMBERS),
    Mutation("unseen keys with an end before their begin", KERNEL, "end > begin ? end : begin", "end", NUMBERS),
    Mutation(
        "negative lengths",
        KERNEL,
        "clamped(ptx::load_global(lengths + n), 0, INT_MAX)",
        "ptx::load_global(lengths + n)",
        NUMBERS,
    ),
    Mutation("the guard of a grid's last block", KERNEL, "if (j >= job.total_k) return;", ""),
]
