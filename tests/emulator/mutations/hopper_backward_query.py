"""Breaks of the Hopper backward's dQ (sm_90a): barriers, phases, stages, fences, descriptors, masks, zeroed keys."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_backward_driver.cpp"]
ARGUMENTS = ["0", "1", "windows of 300"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=128,128"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_backward_query.cuh"
SHARED = "csrc/cuda/hopper_backward_common.cuh"
COMMON = "csrc/cuda/hopper_common.cuh"

STEP = "  PACKATTN_DEVICE void step(int first_key) {\n    wait_block();\n"
SUMMED = "      ptx::wgmma_wait<0>(dq);\n      free_stage(before);\n    }\n"
FINISHED = "    sum_block();\n    ptx::wgmma_wait<0>(dq);\n    free_stage(before);\n"
DIFFERENTIATED = "      differentiate<MASK>(first_key);\n      finish_before_here();\n"
SKIPPED = (
    "    wait_block();\n    ptx::warp_sync();  // no lane still waits for the phase that lane 0 lets pass\n"
    "    free_stage(at.stage);\n    at.advance();\n"
)
WAITED = "      consumer.wait_rows();\n"
ARRIVED = "      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kRowsEmpty + consumer.rows.stage * 8);\n"


def without(name: str, line: str, caught: str = "report") -> Mutation:
    return Mutation(name, KERNEL, line, "", caught)


MUTATIONS = [
    # ---- barriers and phases
    without("fence after mbarrier.init removed", "    ptx::fence_mbarrier_init();\n"),
    without("barrier after mbarrier.init removed", "  ptx::block_sync();\n"),
    without("empty not waited for", "      ptx::mbarrier_wait(barriers + Shape::kEmpty, at.parity ^ 1);\n"),
    Mutation("empty parity", KERNEL, "kEmpty, at.parity ^ 1", "kEmpty, at.parity"),
    without(
        "rows empty not waited for",
        "      ptx::mbarrier_wait(base + Shape::kRowsEmpty + rows.stage * 8, rows.parity ^ 1);\n",
    ),
    Mutation(
        "rows empty parity",
        KERNEL,
        "kRowsEmpty + rows.stage * 8, rows.parity ^ 1",
        "kRowsEmpty + rows.stage * 8, rows.parity",
    ),
    without("rows full not waited for", WAITED),
    Mutation("rows full parity", KERNEL, "rows.stage * 8, rows.parity);", "rows.stage * 8, rows.parity ^ 1);"),
    Mutation("block not waited for", KERNEL, STEP, "  PACKATTN_DEVICE void step(int first_key) {\n"),
    Mutation(
        "first block not waited for",
        KERNEL,
        "void start(int first_key) {\n    wait_block();\n",
        "void start(int first_key) {\n",
    ),
    Mutation("full parity", KERNEL, "at.stage * 8, at.parity);", "at.stage * 8, at.parity ^ 1);"),
    Mutation("empty counts 4 warps", KERNEL, "kEmpty + i * 8, 4 * Shape::kConsumers", "kEmpty + i * 8, 4"),
    Mutation("rows empty counts 4 warps", KERNEL, "kRowsEmpty + i * 8, 4 * Shape::kConsumers", "kRowsEmpty + i * 8, 4"),
    Mutation("full counts keys or values", KERNEL, "kFull + i * 8, 2)", "kFull + i * 8, 1)"),
    Mutation("rows full counts query or dout", KERNEL, "kRowsFull + i * 8, 2)", "kRowsFull + i * 8, 1)"),
    Mutation(
        "values on the barrier of landed keys",
        KERNEL,
        "value, barriers + Shape::kFull",
        "value, barriers + Shape::kLanded",
    ),
    Mutation(
        "ring one stage too long",
        COMMON,
        "== STAGES) stage = 0",
        "> STAGES) stage = 0",
    ),
    # ---- stages and release
    Mutation(
        "sums with the keys of this block",
        KERNEL,
        "before * Shape::kStageBytes",
        "at.stage * Shape::kStageBytes",
        NUMBERS,
    ),
    Mutation(
        "stage freed before it is read",
        KERNEL,
        SUMMED,
        "      free_stage(before);\n      ptx::wgmma_wait<0>(dq);\n    }\n",
    ),
    Mutation("stage never freed", KERNEL, SUMMED, "      ptx::wgmma_wait<0>(dq);\n    }\n"),
    Mutation("this block's stage freed", KERNEL, SUMMED, SUMMED.replace("before", "at.stage")),
    Mutation(
        "last stage freed before it is read",
        KERNEL,
        FINISHED,
        "    free_stage(before);\n    sum_block();\n    ptx::wgmma_wait<0>(dq);\n",
    ),
    Mutation("last stage never freed", KERNEL, FINISHED, FINISHED.replace("    free_stage(before);\n", "")),
    without("stage of the block before not kept", "    before = at.stage;\n"),
    Mutation(
        "skipped block not waited for",
        KERNEL,
        SKIPPED,
        SKIPPED.replace("    wait_block();\n", ""),
        arguments=("0", "1", "long and short sides"),
    ),
    Mutation("skipped block not freed", KERNEL, SKIPPED, SKIPPED.replace("    free_stage(at.stage);\n", "")),
    Mutation("skipped block stays", KERNEL, SKIPPED, SKIPPED.replace("    at.advance();\n", "")),
    Mutation(
        "blocks after the last seen not skipped",
        KERNEL,
        "      for (; n < blocks; ++n) consumer.skip();\n",
        "",
    ),
    without("rows never freed", "      consumer.free_rows();\n"),
    Mutation("rows freed before they are read", KERNEL, WAITED, WAITED + ARRIVED),
    Mutation("more registers than there are", KERNEL, "kConsumerRegisters = 232", "kConsumerRegisters = 248"),
    Mutation(
        "registers given back by three warps",
        KERNEL,
        "    ptx::registers_decrease",
        "    if (warp != 2) ptx::registers_decrease",
    ),
    # ---- wgmma
    Mutation("no fence before the products", KERNEL, STEP + "    ptx::wgmma_fence();\n", STEP),
    Mutation(
        "no fence before the first products",
        KERNEL,
        "    ptx::wgmma_fence();\n    multiply_block();\n    ptx::wgmma_wait<1>(s);",
        "    multiply_block();\n    ptx::wgmma_wait<1>(s);",
    ),
    Mutation("no fence before the last sums", KERNEL, "    ptx::wgmma_fence();\n" + FINISHED, FINISHED),
    without("wait for the scores removed", "      ptx::wgmma_wait<2>(s);\n"),
    without("wait for dP removed", "      ptx::wgmma_wait<1>(dp);\n"),
    Mutation("wait for the sums too lax", KERNEL, SUMMED, SUMMED.replace("wait<0>", "wait<1>")),
    Mutation("last wait for the sums too lax", KERNEL, FINISHED, FINISHED.replace("wait<0>", "wait<1>")),
    Mutation("dS packed while it is read", KERNEL, DIFFERENTIATED, DIFFERENTIATED + "      gradients[0][0] ^= 1u;\n"),
    Mutation("sums touched in flight", KERNEL, DIFFERENTIATED, DIFFERENTIATED + "      dq[0] += 1.f;\n"),
    Mutation(
        "sums not committed",
        SHARED,
        "advance(from_b, i * 2048), true);\n  }\n  ptx::wgmma_commit();\n",
        "advance(from_b, i * 2048), true);\n  }\n",
    ),
    Mutation("scores not committed", SHARED, "i > 0);\n  }\n  ptx::wgmma_commit();\n", "i > 0);\n  }\n"),
    Mutation("scores added to the last block's", SHARED, "i % 4 * 32), i > 0);", "i % 4 * 32), true);", NUMBERS),
    Mutation(
        "sums begun anew", SHARED, "advance(from_b, i * 2048), true);", "advance(from_b, i * 2048), i > 0);", NUMBERS
    ),
    Mutation("rows of the other group", KERNEL, "+ group * 64 * 128", "+ (1 - group) * 64 * 128", NUMBERS),
    Mutation("panel of the rows", SHARED, "i / 4 * panel_a", "i / 4 * panel_b", NUMBERS),
    Mutation("panel of the keys", SHARED, "i / 4 * panel_b", "i / 4 * panel_a", NUMBERS),
    Mutation("step along the columns", SHARED, "i % 4 * 32)", "i % 4 * 16)", NUMBERS, 2),
    Mutation("groups of eight rows", SHARED, "(a, 16, 1024,", "(a, 16, 512,", NUMBERS),
    Mutation("groups of eight keys", SHARED, "(b, 16, 1024,", "(b, 16, 512,", NUMBERS),
    Mutation("keys taken as the other major", SHARED, "wgmma_ss<T, false, false>", "wgmma_ss<T, false, true>", NUMBERS),
    Mutation("panel stride of the sums", SHARED, "STEPS * 16 * 128, 1024,", "STEPS * 16 * 64, 1024,", NUMBERS),
    Mutation("groups of eight keys of the sums", SHARED, "STEPS * 16 * 128, 1024,", "STEPS * 16 * 128, 512,", NUMBERS),
    Mutation("step along the keys", SHARED, "advance(from_b, i * 2048)", "advance(from_b, i * 1024)", NUMBERS),
    Mutation("sums over the other major", SHARED, "wgmma_rs<T, true>", "wgmma_rs<T, false>", NUMBERS),
    Mutation(
        "operands swapped",
        COMMON,
        "a[i / 4][i % 4] = ptx::pack2<T>(x[2 * i], x[2 * i + 1]);",
        "a[i / 4][i % 4] = ptx::pack2<T>(x[2 * i + 1], x[2 * i]);",
        NUMBERS,
    ),
    Mutation("values read from the keys", KERNEL, "keys + Shape::kKeyBytes, Shape", "keys, Shape", NUMBERS),
    Mutation("dout read from the query", KERNEL, "own + Shape::kQueryBytes, Shape", "own, Shape", NUMBERS),
    Mutation(
        "key head of the query",
        KERNEL,
        "head / (task.heads_q / task.heads_k)",
        "head % task.heads_k",
        NUMBERS,
        arguments=("0", "1", "softcap and sinks"),
    ),
    # ---- masks and foreign keys
    Mutation(
        "a block too many without mask at the end",
        SHARED,
        "(end - tile.begin) / BLOCK : 0",
        "(end - tile.begin) / BLOCK + 1 : 0",
        NUMBERS,
    ),
    Mutation(
        "a block too many without mask at the start",
        SHARED,
        "(x.full_begin - tile.begin + BLOCK - 1) / BLOCK",
        "(x.full_begin - tile.begin) / BLOCK",
        NUMBERS,
    ),
    Mutation(
        "first block that is seen skipped",
        SHARED,
        "(x.some_begin - tile.begin) / BLOCK",
        "(x.some_begin - tile.begin + BLOCK - 1) / BLOCK",
        NUMBERS,
    ),
    Mutation(
        "last block that is seen skipped",
        SHARED,
        "(x.some_end - tile.begin + BLOCK - 1) / BLOCK",
        "(x.some_end - tile.begin) / BLOCK",
        NUMBERS,
    ),
    Mutation(
        "first block without mask", KERNEL, "differentiate<true>(first_key)", "differentiate<false>(first_key)", NUMBERS
    ),
    Mutation("masks of the first lane", KERNEL, "ranges.end[r] - lane % 4 * 2", "ranges.end[r]", NUMBERS),
    Mutation("masked by a product", KERNEL, "outside ? 0.f : ds", "ds * (outside ? 0.f : 1.f)", NUMBERS),
    Mutation(
        "keys of others not zeroed",
        KERNEL,
        "const bool whole = tile.end - tile.begin >= (n + 1) * BN;",
        "const bool whole = true;",
    ),
    without(
        "zeroed before they have landed",
        "    ptx::mbarrier_wait(base + Shape::kLanded + stage * 8, parities >> stage & 1);\n",
    ),
    without("parity of landed keys", "    parities ^= 1u << stage;\n"),
    without("no proxy fence after zeroing", "    ptx::fence_proxy_async();  // wgmma is to see the zeros\n"),
    Mutation("zeroing not joined", KERNEL, "see the zeros\n    ptx::warp_sync();\n", "see the zeros\n"),
    Mutation("one row too few zeroed", KERNEL, "kStageBytes, own, lane);", "kStageBytes, own + 1, lane);", NUMBERS),
    Mutation("another stage zeroed", KERNEL, "(uses - 1) % Shape::STAGES", "uses % Shape::STAGES"),
    # ---- numbers
    Mutation("delta not subtracted", KERNEL, "(dp[i] - stats[r].y)", "dp[i]", NUMBERS),
    Mutation("statistics of the other row", KERNEL, "stats[i / 2 % 2].x", "stats[1 - i / 2 % 2].x", NUMBERS),
    Mutation(
        "derivative of the soft cap left out",
        KERNEL,
        " * (1.f - t * t)",
        "",
        NUMBERS,
        arguments=("0", "1", "softcap and sinks"),
    ),
    Mutation("scale left out", KERNEL, "r, task.scale, begin[r]", "r, 1.f, begin[r]", NUMBERS),
    # ---- the end
    Mutation("statistics past the tile loaded", KERNEL, "stats[r] = row < tile.rows ?", "stats[r] = row < 1 << 30 ?"),
    Mutation("rows past the tile stored", KERNEL, "in_tile < tile.rows, task", "row < task.total_q, task"),
    Mutation(
        "columns past the head stored",
        KERNEL,
        "task.head_dim, lane % 4",
        "D, lane % 4",
        NUMBERS,
        arguments=("0", "1", "windows both ways"),
    ),
]
