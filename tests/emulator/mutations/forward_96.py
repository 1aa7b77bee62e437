"""Breaks of the tensor-core forward at head dim 96: two slots in the ring, rows of half a 128-byte line more."""

from mutation import Mutation

PROGRAMS = ["forward_driver.cpp"]
ARGUMENTS = ["20"]
FLAGS = ["-DFORWARD_DRIVER_ONLY=96,96"]
KERNEL = "csrc/cuda/attention_forward.cuh"
TILE = "csrc/cuda/mma_tile.cuh"

MUTATIONS = [
    Mutation("no barrier before values", KERNEL, "      ptx::block_sync();  // the values", "      // the values"),
    Mutation("no barrier before keys", KERNEL, "        ptx::block_sync();  // the next", "        // the next"),
    Mutation(
        "wait for keys too lax",
        KERNEL,
        "        ptx::cp_async_wait<AHEAD - 1>();\n        ptx::block_sync();  // the next",
        "        ptx::cp_async_wait<AHEAD>();\n        ptx::block_sync();  // the next",
    ),
    Mutation(
        "half lines swizzled like lines", TILE, "G == 8 ? row & 7 : row >> 1 & 3;\n  return", "row & (G - 1);\n  return"
    ),
]
