"""Breaks of the Hopper backward's dK and dV (sm_90a): barriers, phases, stages, notes, fences, descriptors, masks, zeroed
rows, statistics."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_backward_driver.cpp"]
ARGUMENTS = ["0", "1", "windows of 300"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=128,128"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_backward_keys.cuh"
SKIPS = ("0", "1", "long and short sides")
PADDED = ("0", "1", "34 each")
CAPPED = ("0", "1", "softcap and sinks")  # where dS is masked by nothing but its own mask

ARRIVE = "if (lane == 0) ptx::mbarrier_arrive(base + Shape::kFull + stage * 8);\n"
FREE = "    if (lane == 0) ptx::mbarrier_arrive(base + Shape::kEmpty + Shape::stage(uses) * 8);\n"
OWN = "      if (lane == 0) ptx::mbarrier_arrive(base + Shape::kOwnEmpty);"
SUMMED = "      ptx::wgmma_wait<0>(dv, dp);\n"
STEP = (
    "    make_operand<MASK>(row);\n    wait_full(uses + 1);\n    ptx::wgmma_fence();\n    multiply_scores(uses + 1);\n"
)
WAIT_OPERAND = "    if constexpr (Shape::kPass == 0) {\n      ptx::wgmma_wait<0>(dk);\n"


def without(name: str, line: str, caught: str = "report", arguments: tuple[str, ...] | None = None) -> Mutation:
    return Mutation(name, KERNEL, line, "", caught, arguments=arguments)


MUTATIONS = [
    # ---- barriers and phases
    without("fence after mbarrier.init removed", "    ptx::fence_mbarrier_init();\n"),
    without("barrier after mbarrier.init removed", "  ptx::block_sync();\n"),
    without(
        "own empty not waited for",
        "        ptx::mbarrier_wait(base + Shape::kOwnEmpty, static_cast<uint32_t>(items) % 2 ^ 1);\n",
    ),
    Mutation(
        "own empty parity",
        KERNEL,
        "kOwnEmpty, static_cast<uint32_t>(items) % 2 ^ 1",
        "kOwnEmpty, static_cast<uint32_t>(items) % 2",
    ),
    without(
        "own full not waited for",
        "        ptx::mbarrier_wait(base + Shape::kOwnFull, static_cast<uint32_t>(items) % 2);\n",
    ),
    Mutation(
        "own full parity",
        KERNEL,
        "kOwnFull, static_cast<uint32_t>(items) % 2);",
        "kOwnFull, static_cast<uint32_t>(items) % 2 ^ 1);",
    ),
    Mutation(
        "copier does not wait for an empty stage",
        KERNEL,
        "        ptx::mbarrier_wait(base + Shape::kEmpty + stage * 8, Shape::parity(uses) ^ 1);\n        ++uses;\n"
        "        ptx::mbarrier_arrive_expect",
        "        ++uses;\n        ptx::mbarrier_arrive_expect",
    ),
    Mutation(
        "statistics do not wait for an empty stage",
        KERNEL,
        "        ptx::mbarrier_wait(base + Shape::kEmpty + stage * 8, Shape::parity(uses) ^ 1);\n        ++uses;\n#pragma",
        "        ++uses;\n#pragma",
    ),
    Mutation("empty parity", KERNEL, "Shape::parity(uses) ^ 1", "Shape::parity(uses)", count=2),
    Mutation(
        "full parity",
        KERNEL,
        "kFull + Shape::stage(use) * 8, Shape::parity(use));",
        "kFull + Shape::stage(use) * 8, Shape::parity(use) ^ 1);",
    ),
    Mutation("next block not waited for", KERNEL, STEP, STEP.replace("    wait_full(uses + 1);\n", "")),
    Mutation(
        "first block not waited for",
        KERNEL,
        "void start(int row) {\n    wait_full(uses);\n",
        "void start(int row) {\n",
    ),
    Mutation(
        "skipped block not waited for",
        KERNEL,
        "void skip() {\n    wait_full(uses);\n",
        "void skip() {\n",
        arguments=SKIPS,
    ),
    Mutation(
        "skipped block not freed",
        KERNEL,
        "    wait_full(uses);\n    free_stage();",
        "    wait_full(uses);\n    ++uses;",
    ),
    Mutation("full counts the rows alone", KERNEL, "kFull + i * 8, 2)", "kFull + i * 8, 1)"),
    Mutation("empty counts 4 warps", KERNEL, "kEmpty + i * 8, 4 * CONSUMERS", "kEmpty + i * 8, 4"),
    Mutation("own empty counts 4 warps", KERNEL, "kOwnEmpty, 4 * CONSUMERS", "kOwnEmpty, 4"),
    Mutation(
        "half of the rows announced", KERNEL, "(barrier, Shape::kBufferBytes)", "(barrier, Shape::kBufferBytes / 2)"
    ),
    Mutation(
        "keys announced, values not",
        KERNEL,
        "(full, Shape::kKeyBytes + Shape::kValueBytes)",
        "(full, Shape::kKeyBytes)",
    ),
    # ---- stages and release
    Mutation("one buffer for all stages", KERNEL, "hopper::Ring<STAGES>::stage(use) * kBufferBytes", "0 * use"),
    Mutation(
        "statistics of one stage", KERNEL, "to = base + Shape::kStats + stage *", "to = base + Shape::kStats + 0 *"
    ),
    Mutation(
        "stage freed before it is read",
        KERNEL,
        "    weigh<MASK>(uses + 1, row + ROWS);\n    wait_operand();",
        "    weigh<MASK>(uses + 1, row + ROWS);\n" + FREE + "    wait_operand();",
    ),
    without("stage never freed", FREE),
    without(
        "stage freed while lanes read statistics", "    ptx::warp_sync();  // all lanes have read their statistics\n"
    ),
    Mutation("next stage freed", KERNEL, FREE, FREE.replace("stage(uses)", "stage(uses + 1)")),
    Mutation(
        "keys freed before they are read",
        KERNEL,
        "      if (has_blocks) {\n",
        "      if (has_blocks) {\n" + OWN + "\n",
    ),
    Mutation("keys never freed", KERNEL, "  " + OWN, "        // "),
    # ---- notes
    without("notes written while they are read", "    ptx::warp_sync();  // all have read those of the item before\n"),
    Mutation(
        "notes not joined",
        KERNEL,
        "      }\n    }\n    ptx::warp_sync();\n  }\n\n  // All blocks",
        "      }\n    }\n  }\n\n  // All blocks",
    ),
    Mutation("notes of the other warps", KERNEL, "warp * Shape::kNotesBytes", "0 * Shape::kNotesBytes"),
    Mutation("a head too few", KERNEL, "heads > 0; --heads) run_head", "heads > 1; --heads) run_head"),
    Mutation("items not counted", KERNEL, "has_blocks ? items + 1 : items", "items"),
    Mutation("a round left out", KERNEL, "round = noted(kRound) + 1,", "round = noted(kRound) + 2,"),
    Mutation(
        "rounds in another order than the copier's",
        KERNEL,
        "      const KeyItem item(task, round);\n      if",
        "      const KeyItem item(task, round + round % 2);\n      if",
    ),
    # ---- registers
    Mutation("more registers than there are", KERNEL, "ROWS > 64 ? 232 : 240", "ROWS > 64 ? 232 : 248"),
    Mutation(
        "registers given back by three warps",
        KERNEL,
        "    ptx::registers_decrease",
        "    if (warp != 3) ptx::registers_decrease",
    ),
    # ---- wgmma
    Mutation("no fence before the scores", KERNEL, STEP, STEP.replace("    ptx::wgmma_fence();\n", "")),
    Mutation(
        "no fence before the first scores",
        KERNEL,
        "    wait_full(uses);\n    ptx::wgmma_fence();\n",
        "    wait_full(uses);\n",
    ),
    Mutation(
        "no fence before dV",
        KERNEL,
        "      ptx::wgmma_fence();\n      multiply_columns<T>(dv, operands, base",
        "      multiply_columns<T>(dv, operands, base",
    ),
    Mutation(
        "no fence before the last dK",
        KERNEL,
        "    ptx::wgmma_fence();\n    multiply_operand();\n    wait_operand();",
        "    multiply_operand();\n    wait_operand();",
    ),
    without("scores not waited for", "    ptx::wgmma_wait<Shape::kMakesValue ? 1 : 2>(s);\n"),
    Mutation("scores waited for too laxly", KERNEL, "Shape::kMakesValue ? 1 : 2", "Shape::kMakesValue ? 2 : 2"),
    Mutation("dP not waited for", KERNEL, SUMMED, "      ptx::wgmma_wait<1>(dv, dp);\n"),
    Mutation("dK not waited for", KERNEL, WAIT_OPERAND, WAIT_OPERAND.replace("<0>", "<1>")),
    Mutation(
        "operand packed while it is read",
        KERNEL,
        "    weigh<MASK>(uses + 1, row + ROWS);\n",
        "    weigh<MASK>(uses + 1, row + ROWS);\n    operands[0][0] ^= 1u;\n",
    ),
    Mutation("dV touched in flight", KERNEL, SUMMED, "      dv[0] += 1.f;\n" + SUMMED),
    Mutation(
        "dV with the operand of dK",
        KERNEL,
        "multiply_columns<T>(dk, operands, buffer)",
        "multiply_columns<T>(dk, operands, buffer + Shape::kDout)",
        NUMBERS,
    ),
    Mutation("dO for Q", KERNEL, "base + Shape::buffer(use) + Shape::kDout,", "base + Shape::buffer(use),", NUMBERS),
    Mutation(
        "keys of the other group", KERNEL, "base + warp / 4 * 64 * 128", "base + (1 - warp / 4) * 64 * 128", NUMBERS
    ),
    Mutation("panel of the keys", KERNEL, "(s, own, Shape::kKeyPanel,", "(s, own, Shape::kRowPanel,", NUMBERS),
    Mutation(
        "panel of the rows",
        KERNEL,
        "Shape::buffer(use), Shape::kRowPanel);",
        "Shape::buffer(use), Shape::kKeyPanel);",
        NUMBERS,
    ),
    Mutation("values where the keys are", KERNEL, "(dp, own + Shape::kValue,", "(dp, own,", NUMBERS),
    # ---- numbers
    Mutation("lse of the delta", KERNEL, "kStatsBytes + ROWS * 4 +", "kStatsBytes +", NUMBERS),
    Mutation(
        "statistics of the block before",
        KERNEL,
        "Shape::stage(use) * Shape::kStatsBytes",
        "Shape::stage(use + 3) * Shape::kStatsBytes",
        NUMBERS,
    ),
    Mutation("statistics of the row beside", KERNEL, "i % 2 == 0 ? x.x : x.y;", "i % 2 == 1 ? x.x : x.y;", NUMBERS),
    Mutation("delta of the row beside", KERNEL, "(i % 2 == 0 ? x.x : x.y))", "(i % 2 == 1 ? x.x : x.y))", NUMBERS),
    Mutation(
        "statistics of one head",
        KERNEL,
        "int64_t first = head * task.total_q",
        "int64_t first = 0 * task.total_q",
        NUMBERS,
    ),
    Mutation(
        "rows of one head",
        KERNEL,
        "for (int left = item.group; left > 0; --left, ++head)",
        "for (int left = item.group; left > 0; --left)",
        NUMBERS,
    ),
    without("sums not cleared", "      for (float& x : dk) x = 0.f;\n", NUMBERS),
    Mutation("dK not scaled", KERNEL, "dk, r, task.scale,", "dk, r, 1.f,", NUMBERS),
    Mutation("rows past the tile stored", KERNEL, "mine = in_tile < tile.rows", "mine = key < task.total_k"),
    Mutation(
        "keys that nobody sees keep their sums",
        KERNEL,
        "seen = ptx::fint(range.x) < ptx::fint(range.y)",
        "seen = true",
        NUMBERS,
        arguments=("12", "5"),
    ),
    # ---- masks and foreign rows
    Mutation(
        "a block too many without mask at the end",
        KERNEL,
        "note(kFull, blocks.last - 1)",
        "note(kFull, blocks.last)",
        NUMBERS,
    ),
    Mutation(
        "a block too many without mask at the start",
        KERNEL,
        "note(kFirst, blocks.first)",
        "note(kFirst, blocks.first - 1)",
        NUMBERS,
        arguments=CAPPED,
    ),
    Mutation(
        "last block without mask",
        KERNEL,
        "make_operand<true>(row);",
        "make_operand<false>(row);",
        NUMBERS,
        arguments=CAPPED,
    ),
    Mutation("first weights without mask", KERNEL, "weigh<true>(uses, row);", "weigh<false>(uses, row);", NUMBERS),
    Mutation(
        "a block too few", KERNEL, "note(kLast, blocks.some_last - 1)", "note(kLast, blocks.some_last - 2)", NUMBERS
    ),
    Mutation("weights not masked", KERNEL, "= MASK && !seen(at) ? 0.f : weight", "= weight", NUMBERS),
    Mutation(
        "gradients not masked",
        KERNEL,
        "dp[at] = MASK && !seen(at) ? 0.f : gradient",
        "dp[at] = gradient",
        NUMBERS,
        arguments=CAPPED,
    ),
    Mutation("mask ends a row late", KERNEL, "column < end[r];", "column <= end[r];", NUMBERS),
    Mutation("mask begins a row late", KERNEL, "column >= begin[r] &&", "column > begin[r] &&", NUMBERS),
    Mutation(
        "ranges of the key eight further",
        KERNEL,
        "r = i / 2 % 2;\n      return column",
        "r = 1 - i / 2 % 2;\n      return column",
        NUMBERS,
    ),
    Mutation("foreign rows not zeroed", KERNEL, "const bool whole = end - row >= ROWS;", "const bool whole = true;"),
    without(
        "zeroed before they have landed",
        "        ptx::mbarrier_wait(base + Shape::kLanded + stage * 8, parities >> stage & 1);\n",
    ),
    without("parity of landed rows", "        parities ^= 1u << stage;\n"),
    without("no proxy fence after zeroing", "        ptx::fence_proxy_async();  // wgmma is to see the zeros\n"),
    Mutation(
        "zeroing not joined",
        KERNEL,
        "to see the zeros\n        ptx::warp_sync();\n",
        "to see the zeros\n",
    ),
    without(
        "foreign Q not zeroed",
        "        if constexpr (Shape::kMakesKey) zero_rows<Shape::D, ROWS>(buffer, own, lane);\n",
        NUMBERS,
        PADDED,
    ),
    without(
        "foreign dO not zeroed",
        "        if constexpr (Shape::kMakesValue) zero_rows<Shape::DV, ROWS>(buffer + Shape::kDout, own, lane);\n",
        NUMBERS,
        PADDED,
    ),
    Mutation(
        "one row too few zeroed",
        KERNEL,
        "const int own = end - row;",
        "const int own = end - row + 1;",
        NUMBERS,
        arguments=PADDED,
    ),
    Mutation(
        "statistics past the last row",
        KERNEL,
        "if (row + i * 32 + lane < end)",
        "if (row + i * 32 + lane < end + ROWS)",
        arguments=PADDED,
    ),
    Mutation(
        "statistics not joined",
        KERNEL,
        "        ptx::warp_sync();\n        " + ARRIVE + "      });\n}\n\n// What",
        "        " + ARRIVE + "      });\n}\n\n// What",
    ),
]
