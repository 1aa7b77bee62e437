"""Breaks of the Hopper backward's dQ where the ring has two stages, so that dQ of a block goes before S of the next."""

from mutation import Mutation

PROGRAMS = ["hopper_backward_driver.cpp"]
ARGUMENTS = ["0", "1", "windows of 300"]
FLAGS = ["-DBACKWARD_DRIVER_ONLY=192,128"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_backward_query.cuh"

SUMMED = "      ptx::wgmma_wait<2>(dq);\n      free_stage(before);\n"
WEIGHED = "      ptx::wgmma_wait<1>(s);\n      weigh();\n      finish_before_here();\n      ptx::wgmma_wait<0>(dp);\n"

MUTATIONS = [
    Mutation(
        "stage freed before it is read", KERNEL, SUMMED, "      free_stage(before);\n      ptx::wgmma_wait<2>(dq);\n"
    ),
    Mutation("stage never freed", KERNEL, SUMMED, "      ptx::wgmma_wait<2>(dq);\n"),
    Mutation("this block's stage freed", KERNEL, SUMMED, SUMMED.replace("before", "at.stage")),
    Mutation("wait for the sums removed", KERNEL, SUMMED, "      free_stage(before);\n"),
    Mutation("wait for the scores removed", KERNEL, WEIGHED, WEIGHED.replace("      ptx::wgmma_wait<1>(s);\n", "")),
    Mutation("wait for dP too lax", KERNEL, WEIGHED, WEIGHED.replace("wait<0>", "wait<1>")),
    Mutation("dS packed while it is read", KERNEL, SUMMED, "      gradients[0][0] ^= 1u;\n" + SUMMED),
    Mutation(
        "sums after the products",
        KERNEL,
        "      sum_block();\n      multiply_block();\n",
        "      multiply_block();\n      sum_block();\n",
    ),
    Mutation("ring of one stage", KERNEL, "at.parity ^ 1);", "at.parity ^ 1), at.stage = 0;"),
]
