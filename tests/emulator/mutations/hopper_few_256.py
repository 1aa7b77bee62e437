"""Breaks of the Hopper forward for documents of few rows where out is summed in two parts (head dim 256)."""

from mutation import NUMBERS, Mutation

PROGRAMS = ["hopper_driver.cpp"]
ARGUMENTS = ["0", "1", "few rows, many keys, 256"]
FLAGS = ["-DFORWARD_DRIVER_ONLY=256,256"]
POLICIES = ["0", "2"]
KERNEL = "csrc/cuda/hopper_forward.cuh"

MUTATIONS = [
    Mutation("values of the first part", KERNEL, "part * COLUMNS / 64 * Shape::kPanel + i", "0 * part + i", NUMBERS),
    Mutation("second part not waited for", KERNEL, "ptx::wgmma_wait<0>(o[0], o[1]);", "ptx::wgmma_wait<0>(o[0]);"),
    Mutation("both parts stored at one place", KERNEL, "to + part * COLUMNS, o", "to, o", NUMBERS),
    Mutation("columns stored past the head's", KERNEL, "task.head_dim_v - part * COLUMNS,", "task.head_dim_v,"),
    Mutation("second part not cleared", KERNEL, "part < Shape::kParts; ++part", "part < 1; ++part", NUMBERS),
]
