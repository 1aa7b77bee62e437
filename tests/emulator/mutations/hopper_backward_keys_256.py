"""Breaks of the Hopper backward's dK and dV where each has a pass of its own."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_backward_driver.cpp"]
ARGUMENTS = ["0", "1", "256"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=256,256"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_backward_keys.cuh"
LAUNCH = "csrc/cuda/hopper_backward_launch.cuh"

VALUE = "    } else if constexpr (Shape::kPass == 1) {\n      ptx::wgmma_wait<0>(dv);\n"
KEY = "    } else {\n      ptx::wgmma_wait<0>(dk, dp);\n"

MUTATIONS = [
    Mutation(
        "no second pass", LAUNCH, "if constexpr (kFirstPass == 1) run_keys", "if constexpr (false) run_keys", NUMBERS
    ),
    Mutation("dV not waited for", KERNEL, VALUE, VALUE.replace("<0>", "<1>")),
    Mutation("dK not waited for", KERNEL, KEY, KEY.replace("<0>", "<1>")),
    Mutation("dP not waited for with dK", KERNEL, KEY, KEY.replace("(dk, dp)", "(dk)")),
    Mutation(
        "dP not waited for in the first block",
        KERNEL,
        "      ptx::wgmma_wait<0>(s, dp);\n",
        "      ptx::wgmma_wait<1>(s);\n",
    ),
    Mutation("scores waited for too laxly", KERNEL, "Shape::kMakesValue ? 1 : 2", "Shape::kMakesValue ? 1 : 3"),
    Mutation(
        "dV of Q",
        KERNEL,
        "multiply_columns<T>(dv, operands, buffer + Shape::kDout);",
        "multiply_columns<T>(dv, operands, buffer);",
        NUMBERS,
    ),
    Mutation(
        "values not copied",
        KERNEL,
        "        if constexpr (Shape::kMakesKey) {\n          request_panels",
        "        if constexpr (false) {\n          request_panels",
    ),
    Mutation("statistics past the stage", KERNEL, "if (ROWS % 32 != 0 && at >= ROWS) break;", "if (false) break;"),
    Mutation(
        "a soft cap's derivative left out",
        KERNEL,
        "weight * (1.f - t * t)",
        "weight",
        NUMBERS,
        arguments=("0", "1", "200 and 232, bidirectional"),
    ),
    Mutation(
        "weights with a soft cap multiplied by its derivative",
        KERNEL,
        "pack_operands<T>(operands, SOFTCAP ? s : slope)",
        "pack_operands<T>(operands, slope)",
        NUMBERS,
        arguments=("0", "1", "200 and 232, bidirectional"),
    ),
]
