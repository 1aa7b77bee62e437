"""Breaks of the tensor-core backward at head dim 128: two warps share their keys and hand each other weights."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["backward_driver.cpp"]
ARGUMENTS = ["4"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=128,128"]
KEYS = "csrc/cuda/attention_backward.cuh"
COMMON = "csrc/cuda/attention_backward_common.cuh"

MUTATIONS = [
    Mutation(
        "weights overwritten while they are read",
        KEYS,
        "if (at > 0) ptx::named_sync(1 + group, SPLIT * 32);  // B3",
        "// B3",
    ),
    Mutation(
        "weights read before they are there",
        KEYS,
        "        ptx::named_sync(1 + group, SPLIT * 32);  // B4",
        "        // B4",
    ),
    Mutation(
        "barrier for too many warps",
        KEYS,
        "        ptx::named_sync(1 + group, SPLIT * 32);  // B4",
        "        ptx::named_sync(1 + group, SPLIT * 64);  // B4",
    ),
    Mutation(
        "one barrier for all groups",
        KEYS,
        "        ptx::named_sync(1 + group, SPLIT * 32);  // B4",
        "        ptx::named_sync(1, SPLIT * 32);  // B4",
    ),
    Mutation(
        "the other's weights with one's own rows",
        KEYS,
        "theirs = at + other * PART",
        "theirs = at + part * PART",
        NUMBERS,
    ),
    Mutation("one's own weights twice", KEYS, "(group * SPLIT + other)", "(group * SPLIT + part)", NUMBERS),
    Mutation("the other's columns of dK", KEYS, "queries + part * S::kColumns * 2", "queries", NUMBERS),
    Mutation(
        "columns stored where the other's belong",
        KEYS,
        "task.dkey.head_stride + part * S::kColumns,",
        "task.dkey.head_stride,",
        NUMBERS,
    ),
    Mutation("room for one kind of weights", KEYS, "2 * MT * (kPart / 16) * 512;", "MT * (kPart / 16) * 512;"),
    Mutation(
        "operands a block too close",
        COMMON,
        "(m * KS + ks) * 512 + lane * 16, uint4",
        "(m * KS + ks) * 256 + lane * 16, uint4",
    ),
    Mutation("skips a slice too many", KEYS, "slice >= span.some_end", "slice >= span.some_end - 1", NUMBERS),
]
