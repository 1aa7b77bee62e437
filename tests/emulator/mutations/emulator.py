"""Breaks of the emulator itself: its own tests must notice that it computes wrongly or has gone blind."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["selftest.cpp", "selftest_sm90.cpp"]
POLICIES = ["0", "2"]
FOLDER = "tests/emulator/"

MUTATIONS = [
    Mutation(
        "fragment A: registers 1 and 2 swapped",
        FOLDER + "matrix.h",
        "a[g + 8 * (r % 2)][8 * (r / 2)]",
        "a[g + 8 * (r / 2)][8 * (r % 2)]",
        NUMBERS,
    ),
    Mutation("ldmatrix forgets to transpose", FOLDER + "matrix.h", "if (transposed) transpose_8x8(rows);", "", NUMBERS),
    Mutation("float16 of minus infinity", FOLDER + "numbers.h", "sign | 0x7C00u", "0x7C00u", NUMBERS),
    Mutation("float16 subnormals", FOLDER + "numbers.h", "16777216.0", "8388608.0", NUMBERS),
    Mutation("reads are not remembered", FOLDER + "shared_memory.h", "cell.read_by |= warp;", "", NUMBERS),
    Mutation(
        "a warp's barrier orders the block",
        FOLDER + "order.h",
        "    row(warp)[warp] = now(warp * 32);\n    advance(warp);",
        "    block_sync();",
        NUMBERS,
    ),
    Mutation(
        "lanes of a warp always know each other",
        FOLDER + "order.h",
        "if (mask == 0) return true;",
        "if (mask == 0 || thread / 32 == warp) return true;",
        NUMBERS,
    ),
    Mutation(
        "asynchronous copies land at once",
        FOLDER + "memory.h",
        "SharedMemory::Content::pending",
        "SharedMemory::Content::valid",
        NUMBERS,
    ),
    Mutation(
        "copies left over are forgotten",
        FOLDER + "launch.h",
        "if (t.copies_landed == t.copies.size()) continue;",
        "continue;",
        NUMBERS,
    ),
    Mutation(
        "shared memory has no end",
        FOLDER + "shared_memory.h",
        "static_cast<size_t>(address) + bytes > size_",
        "false",
        NUMBERS,
    ),
    Mutation(
        "buffers have no end",
        FOLDER + "global_memory.h",
        "if (address + bytes > buffer->end) return nullptr;",
        "",
        NUMBERS,
    ),
    Mutation(
        "blocks are one in global memory", FOLDER + "global_memory.h", "before.block != now.block || ", "", NUMBERS
    ),
    Mutation(
        "global memory by words of four bytes",
        FOLDER + "global_memory.h",
        "while ((offset | bytes) % buffer->grain) halve(*buffer);",
        "while (buffer->grain > 4 && (offset | bytes) % buffer->grain) halve(*buffer);",
        NUMBERS,
    ),
    Mutation(
        "collectives may be mixed",
        FOLDER + "warp.h",
        "warp.operation != operation || !same(warp.site, site)",
        "false",
        NUMBERS,
    ),
    Mutation(
        "the cap on reports is off by one",
        FOLDER + "launch.h",
        "r.total() < config().report_cap",
        "r.total() <= config().report_cap",
        NUMBERS,
    ),
    Mutation("random schedules forget the seed", FOLDER + "launch.h", "config().seed", "uint64_t{1}", NUMBERS, count=2),
    Mutation(
        "swizzle of 128 bytes is that of 64", FOLDER + "tma.h", "address >> 3 & 0x70", "address >> 3 & 0x30", NUMBERS
    ),
    Mutation(
        "a bulk copy's bytes are not awaited", FOLDER + "sm90_barriers.h", "m.pending_bytes += bytes;", "", NUMBERS
    ),
    Mutation("outside of the tensor nothing is filled", FOLDER + "tma.h", "std::memset(to, 0, element);", "", NUMBERS),
    Mutation(
        "accumulators in flight are not marked",
        FOLDER + "wgmma.h",
        "        for (size_t i = 0; i < words; ++i) std::memcpy(g.accumulators[l] + i, &kInFlight, 4);\n",
        "",
        NUMBERS,
    ),
    Mutation(
        "proxies see each other's writes",
        FOLDER + "shared_memory.h",
        "if (fences_of(cell.writer) > cell.fences) return;",
        "return;",
        NUMBERS,
    ),
]
