"""Breaks of the Hopper backward's dQ where query and dout have a ring of two stages."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_backward_driver.cpp"]
ARGUMENTS = ["0", "1", "100,28,1,71"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=64,64"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_backward_query.cuh"

MUTATIONS = [
    Mutation("rows copied to the first stage", KERNEL, "rows_to = base + rows.stage *", "rows_to = base + 0 *"),
    Mutation("rows of the first stage", KERNEL, "own = base + rows.stage *", "own = base + 0 *", NUMBERS),
    Mutation("rows freed in the first stage", KERNEL, "kRowsEmpty + rows.stage * 8);", "kRowsEmpty);"),
    Mutation(
        "copier stays at a stage", KERNEL, "full, head, tile.row);\n      rows.advance();\n", "full, head, tile.row);\n"
    ),
    Mutation("consumer stays at a stage", KERNEL, "rows.stage * 8);\n    rows.advance();\n", "rows.stage * 8);\n"),
    Mutation("one stage of barriers", KERNEL, "i < Shape::ROW_STAGES", "i < 1"),
]
