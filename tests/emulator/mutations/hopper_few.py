"""Breaks of the Hopper forward for documents of few rows: stacked heads, who serves what, barriers of one consumer."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_driver.cpp"]
ARGUMENTS = ["0", "1", "few rows, four heads"]
FLAGS = ["-DFORWARD_DRIVER_ONLY=128,128"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_forward.cuh"
LAUNCH = "csrc/cuda/hopper_forward_launch.cuh"
MAP = "csrc/cuda/tensor_map.cuh"

THREE = ("0", "1", "few rows, three heads")
STACKS = ", stacks = task.heads_q >> Shape::heads_log2(stack);"
ALL = ", stacks = task.heads_q;"

MUTATIONS = [
    # ---- rows and heads of a tile
    Mutation("ranges not stacked", KERNEL, "lane, Shape::heads_log2(stack));", "lane, 0);", NUMBERS),
    Mutation("rows stored not stacked", KERNEL, "in_tile = in_group >> heads_log2;", "in_tile = in_group;", NUMBERS),
    Mutation("rows past the tile stored", KERNEL, "mine = in_tile < tile.rows", "mine = row < task.total_q"),
    Mutation("one head stored", KERNEL, " + (in_group & ((1 << heads_log2) - 1))", ""),
    Mutation("heads of the store side by side", KERNEL, "(item.head() << heads_log2)", "item.head()", NUMBERS),
    Mutation(
        "one sink for a stack", KERNEL, "task.sinks + head)", "task.sinks + (item.head() << heads_log2))", NUMBERS
    ),
    Mutation(
        "query of another head",
        KERNEL,
        "item.head() << Shape::heads_log2(stack), head_k",
        "item.head(), head_k",
        NUMBERS,
    ),
    Mutation("items of all heads copied", KERNEL, STACKS + "\n  int items", ALL + "\n  int items"),
    Mutation("items of all heads zeroed", KERNEL, STACKS + "\n  int uses", ALL + "\n  int uses"),
    Mutation(
        "items of all heads computed",
        KERNEL,
        "const int stacks = task.heads_q >> Shape::heads_log2(stack);\n  forward::Item",
        "const int stacks = task.heads_q;\n  forward::Item",
    ),
    Mutation("box of one head", LAUNCH, "Shape::kRows >> stack, 1 << stack)", "Shape::kRows, 1)", NUMBERS),
    Mutation(
        "box of half of the rows",
        LAUNCH,
        "Shape::kRows >> stack, 1 << stack)",
        "Shape::kRows >> stack >> 1, 1 << stack)",
    ),
    Mutation(
        "box of heads and rows swapped",
        MAP,
        "(box_heads), static_cast<uint32_t>(box_rows)",
        "(box_rows), static_cast<uint32_t>(box_heads)",
        NUMBERS,
    ),
    Mutation(
        "stack over two key heads",
        LAUNCH,
        "group % (2 << stack) == 0",
        "group >= (2 << stack)",
        NUMBERS,
        arguments=THREE,
    ),
    Mutation(
        "tiles of more rows than a box",
        LAUNCH,
        "return kFewRows >> few_rows_stack(params);",
        "return kFewRows;",
        NUMBERS,
    ),
    # ---- who serves what
    Mutation("large tiles left out", LAUNCH, "if (task.total_q > kFewRows) run_shape", "if (false) run_shape", NUMBERS),
    Mutation("few rows served by the large tiles' table", LAUNCH, "    few.tiles = task.few_tiles;\n", "", NUMBERS),
    # ---- one consumer
    Mutation("key empty counts 8 warps", KERNEL, "kKeyEmpty + i * 8, 4 * CONSUMERS", "kKeyEmpty + i * 8, 8"),
    Mutation("value empty counts 8 warps", KERNEL, "kValueEmpty + i * 8, 4 * CONSUMERS", "kValueEmpty + i * 8, 8"),
    Mutation("query empty counts 8 warps", KERNEL, "kQueryEmpty, 4 * CONSUMERS", "kQueryEmpty, 8"),
    Mutation(
        "values of the last block freed before they are read",
        KERNEL,
        "    wait_output();\n    free_values();\n  }",
        "    free_values();\n    wait_output();\n  }",
    ),
    Mutation(
        "values of the last block never freed",
        KERNEL,
        "    wait_output();\n    free_values();\n  }",
        "    wait_output();\n  }",
    ),
    Mutation("last values not waited for", KERNEL, "finish() {\n    wait_values();\n", "finish() {\n"),
    Mutation("zeroing loses its place in the ring", KERNEL, "    uses += blocks;\n", ""),
    Mutation("zeroed phases not counted", KERNEL, "      parities ^= 1u << stage;\n", ""),
    Mutation("query not waited for", KERNEL, "      ptx::mbarrier_wait(base + Shape::kQueryFull, items % 2);\n", ""),
    Mutation(
        "query overwritten",
        KERNEL,
        "    ptx::mbarrier_wait(base + Shape::kQueryEmpty, static_cast<uint32_t>(items) % 2 ^ 1);\n",
        "",
    ),
    Mutation("more registers than a block's share", KERNEL, "2 * kShare - kCopierRegisters", "2 * kShare - 24"),
]
