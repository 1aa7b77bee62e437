"""The reports on compiled CUDA code: what they make of machine code, and what the built library must hold to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the reports are in benchmarks/", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import cubin
import ptxas_report
import sass
import sass_report
import shapes


def program(*lines: str) -> sass.Program:
    """Instructions of 16 bytes each, as cuobjdump prints them."""
    return sass.Program("\n".join(f"        /*{n * 16:04x}*/   {line} ;   /* 0x0 */" for n, line in enumerate(lines)))


def test_a_round_is_the_full_block_with_copies_and_without_masks() -> None:
    p = program(
        "MOV R0, RZ",  # 0x00
        "@!P0 BRA 0x0050",  # 0x10  the next block is copied or not
        "LDGSTS.E.128 [R1], [R2]",  # 0x20
        "LDGSTS.E.128 [R1], [R2]",  # 0x30
        "IADD3 R2, R2, 1, RZ",  # 0x40
        "HMMA.16816.F32 R4, R5, R6, R4",  # 0x50
        "@!P1 BRA 0x0090",  # 0x60  a mask is needed or not
        "FSEL R4, R4, RZ, P2",  # 0x70
        "FSEL R5, R5, RZ, P3",  # 0x80
        "HMMA.16816.F32 R4, R5, R6, R4",  # 0x90
        "@P4 BRA 0x0010",  # 0xa0
        "EXIT",  # 0xb0
    )
    found = p.main_loop()
    assert found is not None
    assert (found.tensor_core, found.issued, found.whole) == (2, 8, 10)
    assert found.counts["LDGSTS"] == 2 and found.counts["FSEL"] == 0


def test_an_inner_loop_counts_as_often_as_it_goes_round() -> None:
    p = program(
        "BAR.SYNC 0x0",  # 0x00  outer
        "HMMA R0, R1, R2, R0",  # 0x10  inner
        "@P0 BRA 0x0010",  # 0x20
        "@P1 BRA 0x0000",  # 0x30
        "EXIT",
    )
    found = p.main_loop(tensor_core=4)
    assert found is not None
    assert (found.tensor_core, found.issued) == (4, 1 + 4 * 2 + 1)
    assert p.main_loop(tensor_core=5) is not None  # 5 rounds
    assert (alone := p.main_loop()) is not None and alone.issued == 2
    assert program("EXIT").main_loop() is None


def test_a_loop_that_is_entered_in_its_middle() -> None:
    p = program(
        "BRA 0x0030",  # 0x00
        "LDGSTS.E [R1], [R2]",  # 0x10
        "IADD3 R2, R2, 1, RZ",  # 0x20
        "HMMA R0, R1, R2, R0",  # 0x30  where it is entered
        "@P0 BRA 0x0010",  # 0x40
        "EXIT",
    )
    found = p.main_loop()
    assert found is not None and (found.tensor_core, found.issued) == (1, 4)


def test_a_jump_that_is_spelled_as_a_call() -> None:
    p = program("HMMA R0, R1, R2, R0", "@P0 CALL.REL.NOINC 0x0030", "BRA 0x0000", "EXIT")
    found = p.main_loop()
    assert found is not None and found.issued == 3


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_80", 128, 255, 82944, 2),  # 164 KiB hold 2 x (81 + 1) KiB
        ("sm_80", 128, 255, 41984, 2),  # 2 warps of 256 registers in each quarter
        ("sm_80", 256, 255, 100352, 1),
        ("sm_80", 256, 64, 0, 4),
        ("sm_90", 128, 168, 70656, 3),
        ("sm_90", 256, 255, 166912, 1),
        ("sm_120", 256, 255, 132096, 0),  # one block may have 99 KiB
        ("sm_120", 128, 255, 82944, 1),
        ("sm_80", 1024, 32, 0, 2),
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert shapes.occupancy(arch, threads, registers, shared) == blocks


def test_names_are_taken_apart() -> None:
    kernel = cubin.Kernel(
        "sm_80",
        "_Z",
        "void a::attention_backward_keys<a::BackwardKeyShape<a::bf16_t, 64, false>, true>(a::BackwardTask)",
        1,
        0,
        0,
    )
    assert kernel.base == "attention_backward_keys"
    assert kernel.shape == "a::BackwardKeyShape<a::bf16_t, 64, false>"
    assert kernel.arguments() == "BackwardKeyShape<bf16_t, 64, false>, true"
    assert cubin.Kernel("", "", "a::sinks(a::Task)", 1, 0, 0).base == "sinks"


def test_a_plan_is_held_to() -> None:
    row = {
        "pass": "forward", "kernel": "attention_forward_kernel", "arguments": "", "arch": "sm_90", "head_dim": 128,
        "head_dim_v": 128, "stack": 0, "blocks": 2, "used": True,
    }  # fmt: skip
    plan = {("forward", "128", "9.0, 10.0"): 2}
    assert ptxas_report.faults([row], plan) == []
    assert "plans 3" in ptxas_report.faults([row], {("forward", "128", "9.0, 10.0"): 3})[0]
    assert "plans nothing" in ptxas_report.faults([row], {})[0]
    assert "stack frame" in ptxas_report.faults([{**row, "stack": 8}], plan)[0]
    assert ptxas_report.faults([{**row, "stack": 8, "head_dim": 192, "head_dim_v": 128, "used": False}], plan) == []


# ---- the built library -----------------------------------------------------------------------------------------


def built_library() -> Path:
    if importlib.util.find_spec("triton") is None and "CUOBJDUMP" not in os.environ:
        pytest.skip("cuobjdump is not there (it comes with triton)")
    try:
        return cubin.packattn_library()
    except cubin.MissingTool as error:
        pytest.skip(str(error).splitlines()[0])


def test_no_spills_and_the_planned_occupancy() -> None:
    rows = ptxas_report.collect(built_library(), None)
    assert {row["pass"] for row in rows} >= set(ptxas_report.PASSES.values())
    assert ptxas_report.faults(rows, ptxas_report.read_plan()) == []


@pytest.mark.slow
def test_main_loops_are_as_dense_as_flash_attention_2() -> None:
    library = built_library()
    try:
        flash = sass_report.Flash(sass_report.torch_library(), "sm_80")
    except cubin.MissingTool as error:
        pytest.skip(str(error).splitlines()[0])
    rows = sass_report.judge(sass_report.ours(library, "sm_80"), flash)
    assert {row["passed"] for row in rows} <= {True, None}, sass_report.show(rows, "sm_80")
    assert any(row["passed"] for row in rows)
