"""Breaks of the Hopper forward (sm_90a): barriers, phases, stages, turns, fences, descriptors, masks, zeroed values."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_driver.cpp"]
ARGUMENTS = ["0", "1", "windows of 300"]
FLAGS = ["-DFORWARD_DRIVER_ONLY=128,128"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_forward.cuh"
COMMON = "csrc/cuda/hopper_common.cuh"
MAP = "csrc/cuda/tensor_map.cuh"

TURN = "      ptx::named_sync(1 + group, 256);  // my turn\n"
PASS = "      ptx::named_arrive(1 + (group + 1 == CONSUMERS ? 0 : group + 1), 256);  // the next one's\n"
RELEASE = "    ptx::finish_before_here(l[0] + l[1]);  // the exponentials, which are to run beside P V\n"


def without(name: str, line: str, caught: str = "report") -> Mutation:
    return Mutation(name, KERNEL, line, "", caught)


MUTATIONS = [
    # ---- barriers and phases
    without("fence after mbarrier.init removed", "    ptx::fence_mbarrier_init();\n"),
    without("barrier after mbarrier.init removed", "  ptx::block_sync();\n"),
    without(
        "query empty not waited for",
        "    ptx::mbarrier_wait(base + Shape::kQueryEmpty, static_cast<uint32_t>(items) % 2 ^ 1);\n",
    ),
    Mutation("query empty parity", KERNEL, "static_cast<uint32_t>(items) % 2 ^ 1", "static_cast<uint32_t>(items) % 2"),
    without(
        "key empty not waited for",
        "        ptx::mbarrier_wait(base + Shape::kKeyEmpty + stage * 8, Shape::parity(uses) ^ 1);\n",
    ),
    Mutation("key empty parity", KERNEL, "Shape::parity(uses) ^ 1", "Shape::parity(uses)"),
    without(
        "value empty not waited for",
        "        ptx::mbarrier_wait(base + Shape::kValueEmpty + stage * 8, Shape::parity(use) ^ 1);\n",
    ),
    Mutation("value empty parity", KERNEL, "Shape::parity(use) ^ 1", "Shape::parity(use)"),
    without("query full not waited for", "      ptx::mbarrier_wait(base + Shape::kQueryFull, items % 2);\n"),
    Mutation("query full parity", KERNEL, "kQueryFull, items % 2);", "kQueryFull, items % 2 ^ 1);"),
    Mutation(
        "keys not waited for, first block",
        KERNEL,
        "    wait_keys();\n    ptx::wgmma_fence();",
        "    ptx::wgmma_fence();",
    ),
    Mutation("keys not waited for", KERNEL, "    wait_keys();\n    if constexpr", "    if constexpr"),
    Mutation(
        "values not waited for",
        KERNEL,
        "    multiply_keys();\n    wait_values();\n",
        "    multiply_keys();\n",
    ),
    Mutation(
        "values not waited for, last block",
        KERNEL,
        "  PACKATTN_DEVICE void finish() {\n    wait_values();\n",
        "  PACKATTN_DEVICE void finish() {\n",
    ),
    Mutation(
        "key full parity",
        KERNEL,
        "kKeyFull + Shape::stage(uses) * 8, Shape::parity(uses));",
        "kKeyFull + Shape::stage(uses) * 8, Shape::parity(uses) ^ 1);",
    ),
    Mutation(
        "value full parity",
        KERNEL,
        "kValueFull + Shape::stage(uses - 1) * 8, Shape::parity(uses - 1));",
        "kValueFull + Shape::stage(uses - 1) * 8, Shape::parity(uses - 1) ^ 1);",
    ),
    Mutation("key empty counts 4 warps", KERNEL, "kKeyEmpty + i * 8, 4 * CONSUMERS", "kKeyEmpty + i * 8, 4"),
    Mutation("value empty counts 4 warps", KERNEL, "kValueEmpty + i * 8, 4 * CONSUMERS", "kValueEmpty + i * 8, 4"),
    Mutation("query empty counts 4 warps", KERNEL, "kQueryEmpty, 4 * CONSUMERS", "kQueryEmpty, 4"),
    Mutation("half of the bytes announced", COMMON, "barrier, ROWS * COLUMNS * 2)", "barrier, ROWS * COLUMNS)"),
    # ---- stages and release
    Mutation(
        "values of the stage after", KERNEL, "kValueRing + Shape::stage(uses - 1)", "kValueRing + Shape::stage(uses)"
    ),
    Mutation(
        "keys freed before they are read",
        KERNEL,
        "    ptx::wgmma_wait<1>(s);\n    free_keys();",
        "    free_keys();\n    ptx::wgmma_wait<1>(s);",
    ),
    Mutation(
        "values freed before they are read",
        KERNEL,
        "    wait_output();\n    free_values();\n    ++uses;",
        "    free_values();\n    wait_output();\n    ++uses;",
    ),
    Mutation("keys never freed", KERNEL, "    ptx::wgmma_wait<1>(s);\n    free_keys();", "    ptx::wgmma_wait<1>(s);"),
    Mutation(
        "query freed after the first block",
        KERNEL,
        "      consumer.start(tile.begin + n * BN);",
        "      consumer.start(tile.begin + n * BN);\n      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kQueryEmpty);",
    ),
    without(
        "query never freed",
        "      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kQueryEmpty);  // all products with Q are done\n",
    ),
    # ---- turns and registers
    without("turn not waited for", TURN),
    without("turn not passed on", PASS),
    Mutation("turn passed on to oneself", KERNEL, PASS, "      ptx::named_arrive(1 + group, 256);\n"),
    Mutation("turn passed on before the products", KERNEL, TURN, TURN + PASS),
    Mutation("turn of three groups", KERNEL, TURN, TURN.replace("256", "384")),
    without(
        "first turn not given",
        "  if (consumer.group == CONSUMERS - 1) ptx::named_arrive(1, 256);  // the first turn is group 0's\n",
    ),
    without(
        "last turn not taken",
        "  if (consumer.group == 0) ptx::named_sync(1, 256);  // takes the turn that nobody else will\n",
    ),
    Mutation("more registers than there are", KERNEL, "kConsumers == 2 ? 232", "kConsumers == 2 ? 248"),
    Mutation(
        "registers given back by three warps",
        KERNEL,
        "    ptx::registers_decrease",
        "    if (warp != 2) ptx::registers_decrease",
    ),
    # ---- wgmma
    Mutation(
        "no fence before the products",
        KERNEL,
        "      ptx::turn(group, CONSUMERS, true);\n    }\n    ptx::wgmma_fence();\n    multiply_keys();\n    wait_values();\n"
        "    ptx::wgmma_fence();\n",
        "      ptx::turn(group, CONSUMERS, true);\n    }\n    multiply_keys();\n    wait_values();\n",
    ),
    without("wait for the scores removed", "    ptx::wgmma_wait<1>(s);\n"),
    Mutation(
        "wait for the sums too lax",
        KERNEL,
        RELEASE + "    wait_output();",
        RELEASE + "    ptx::wgmma_wait<1>(o[0]);",
    ),
    Mutation("weights packed while they are read", KERNEL, RELEASE, RELEASE + "    pack_weights();\n"),
    Mutation("sums corrected in flight", KERNEL, RELEASE, RELEASE + "    o[0][0] *= correction[0];\n"),
    Mutation("sums not corrected", KERNEL, "o[part][i] *= factor[i / 2 % 2]", "o[part][i] *= 1.f", NUMBERS),
    Mutation(
        "panel stride of the values",
        KERNEL,
        "Shape::kPanel, 1024, Swizzle",
        "Shape::kPanel / 2, 1024, Swizzle",
        NUMBERS,
    ),
    Mutation("step along the keys", KERNEL, "kPanel + i * 2048)", "kPanel + i * 1024)", NUMBERS),
    Mutation("values taken as the other major", KERNEL, "wgmma_rs<T, true>", "wgmma_rs<T, false>", NUMBERS),
    Mutation("panel of the query", KERNEL, "i / 4 * Shape::kQueryPanel", "i / 4 * 64 * 128", NUMBERS),
    Mutation("rows of the other group", KERNEL, "base + group * 64 * 128", "base + (1 - group) * 64 * 128", NUMBERS),
    Mutation("no swizzle in the map", MAP, "  map.swizzle = 128;\n", "  map.swizzle = 0;\n", NUMBERS),
    Mutation(
        "heads and rows swapped in the map",
        COMMON,
        "barrier, i * 64, head, row)",
        "barrier, i * 64, row, head)",
        NUMBERS,
    ),
    # ---- masks and foreign values
    Mutation(
        "a block too many without mask at the end",
        KERNEL,
        "(full_end - tile.begin) / BN : 0)",
        "(full_end - tile.begin) / BN + 1 : 0)",
        NUMBERS,
    ),
    Mutation(
        "a block too many without mask at the start",
        KERNEL,
        "(full_begin - tile.begin + BN - 1) / BN : 0)",
        "(full_begin - tile.begin) / BN : 0)",
        NUMBERS,
    ),
    Mutation("first block without mask", KERNEL, "weigh<true>(first_key", "weigh<false>(first_key", NUMBERS),
    Mutation("ranges of the other half", COMMON, "upper ? low[1] : low[0]", "upper ? low[0] : low[1]", NUMBERS),
    Mutation(
        "values of others not zeroed",
        KERNEL,
        "const bool whole = tile.end - tile.begin >= (n + 1) * BN;",
        "const bool whole = true;",
    ),
    without(
        "zeroed before they have landed",
        "      ptx::mbarrier_wait(base + Shape::kValueLanded + stage * 8, parities >> stage & 1);\n",
    ),
    without("parity of landed values", "      parities ^= 1u << stage;\n"),
    without("no proxy fence after zeroing", "      ptx::fence_proxy_async();  // wgmma is to see the zeros\n"),
    Mutation("zeroing not joined", KERNEL, "see the zeros\n      ptx::warp_sync();\n", "see the zeros\n"),
    Mutation("one row too few zeroed", COMMON, "int i = first * 128", "int i = (first + 1) * 128", NUMBERS),
    Mutation("only the first panel zeroed", COMMON, "panel < COLUMNS / 64", "panel < 1", NUMBERS),
    # ---- the end
    Mutation(
        "transposition swapped", COMMON, "quad & b ? y[j] : y[j + b], b)", "quad & b ? y[j + b] : y[j], b)", NUMBERS
    ),
    Mutation("rows past the tile stored", KERNEL, "mine = in_tile < tile.rows", "mine = row < task.total_q"),
]
