"""Breaks of the Hopper matrix product (gemm_sm90.cuh): barriers, bulk copies, wgmma."""

from mutation import NUMBERS, SANITIZER, Mutation

PROGRAMS = ["selftest_sm90.cpp"]
POLICIES = ["0", "2"]
KERNEL = "tests/emulator/gemm_sm90.cuh"
HOST = "tests/emulator/selftest_sm90.cpp"

MUTATIONS = [
    Mutation("fence after mbarrier.init removed", KERNEL, "    ptx::fence_mbarrier_init();\n", ""),
    Mutation("barrier after mbarrier.init removed", KERNEL, "  ptx::block_sync();\n", ""),
    Mutation(
        "empty wait removed",
        KERNEL,
        "      ptx::mbarrier_wait(empty + stage * 8, (i / S::kStages & 1) ^ 1);\n",
        "",
    ),
    Mutation("empty parity inverted", KERNEL, "(i / S::kStages & 1) ^ 1", "(i / S::kStages & 1)"),
    Mutation("full wait removed", KERNEL, "    ptx::mbarrier_wait(full + stage * 8, i / S::kStages & 1);\n", ""),
    Mutation(
        "full wait a pass behind",
        KERNEL,
        "ptx::mbarrier_wait(full + stage * 8, i / S::kStages & 1)",
        "ptx::mbarrier_wait(full + stage * 8, (i / S::kStages & 1) ^ 1)",
    ),
    Mutation(
        "stage released a step early",
        KERNEL,
        "if (i > 0 && lane == 0) ptx::mbarrier_arrive(empty + (i - 1) % S::kStages * 8);",
        "if (lane == 0) ptx::mbarrier_arrive(empty + i % S::kStages * 8);",
    ),
    Mutation(
        "stage never released",
        KERNEL,
        "    if (i > 0 && lane == 0) ptx::mbarrier_arrive(empty + (i - 1) % S::kStages * 8);\n",
        "",
    ),
    Mutation("every lane releases", KERNEL, "if (i > 0 && lane == 0) ptx::", "if (i > 0) ptx::"),
    Mutation(
        "empty counts 1 warp, not 4", KERNEL, "mbarrier_init(empty + s * 8, 4)", "mbarrier_init(empty + s * 8, 1)"
    ),
    Mutation("wait for the step before removed", KERNEL, "    ptx::wgmma_wait<1>(sum);", "    //"),
    Mutation("last wait removed", KERNEL, "  ptx::wgmma_wait<0>(sum);\n", ""),
    Mutation(
        "half of the bytes announced", KERNEL, "full + stage * 8, 2 * S::kTileBytes", "full + stage * 8, S::kTileBytes"
    ),
    Mutation(
        "twice the bytes announced",
        KERNEL,
        "full + stage * 8, 2 * S::kTileBytes",
        "full + stage * 8, 4 * S::kTileBytes",
    ),
    Mutation("wgmma.fence removed", KERNEL, "    ptx::wgmma_fence();\n", ""),
    Mutation("commit removed", KERNEL, "    ptx::wgmma_commit();\n", ""),
    Mutation("stride of A halved", KERNEL, "matrix_descriptor(a, 16, 1024,", "matrix_descriptor(a, 16, 512,", NUMBERS),
    Mutation(
        "swizzle of A's descriptor",
        KERNEL,
        "matrix_descriptor(a, 16, 1024, Swizzle::bytes128)",
        "matrix_descriptor(a, 16, 1024, Swizzle::bytes64)",
        NUMBERS,
    ),
    Mutation("no swizzle in the map", HOST, "  map.swizzle = 128;\n", "  map.swizzle = 0;\n", NUMBERS),
    Mutation("step along k halved", KERNEL, "advance(from_a, j * 32)", "advance(from_a, j * 16)", NUMBERS),
    Mutation(
        "coordinates of A swapped",
        KERNEL,
        "ptx::tma_load_2d(a, &map_a, full + stage * 8, i * 64, row0)",
        "ptx::tma_load_2d(a, &map_a, full + stage * 8, row0, i * 64)",
        NUMBERS,
    ),
    Mutation("map with too many rows", HOST, "map.size[1] = rows;", "map.size[1] = rows + 64;"),
    Mutation("box with half of the rows", HOST, "map.box[0] = map.box[1] = 64;", "map.box[0] = 64, map.box[1] = 32;"),
    Mutation(
        "accumulator touched in flight",
        KERNEL,
        "    ptx::wgmma_commit();\n",
        "    ptx::wgmma_commit();\n    sum[3] += 1.f;\n",
    ),
    Mutation("sum begun anew in every step", KERNEL, "i > 0 || j > 0", "j > 0", NUMBERS),
    Mutation("store of C past its rows", KERNEL, "if (row < m && column < n)", "if (column < n)"),
    Mutation("tiles off their alignment", KERNEL, "base = ptx::smem_base(),", "base = ptx::smem_base() + 128,"),
    Mutation("B taken as the other major", KERNEL, "wgmma_ss<T, false, B_MN>", "wgmma_ss<T, false, !B_MN>", NUMBERS),
    Mutation("row of C eight off", KERNEL, "lane / 4 + 8 * (i / 2 % 2)", "lane / 4 + 8 * (i % 2)", SANITIZER),
]
