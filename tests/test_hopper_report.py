"""The report on the sm_90a kernels: what its model makes of machine code, and what it finds fault with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the reports are in benchmarks/", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import cubin
import hopper_model
import hopper_report
import ptxas_report
import sass

SCORES = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24, gsb0"]
VALUES = ["HGMMA.64x64x16.F32.BF16 R88, R180, gdesc[UR8].tnspB, R88, gsb0"]


def path(lines: Sequence[str]) -> tuple[sass.Instruction, ...]:
    return tuple(sass.Instruction(16 * n, line) for n, line in enumerate(lines))


def program(lines: Sequence[str]) -> sass.Program:
    return sass.Program("\n".join(f"        /*{n * 16:04x}*/   {line} ;" for n, line in enumerate(lines)))


def test_products() -> None:
    found = hopper_model.products(path([*SCORES, *VALUES, "FADD R1, R1, R2"]))
    assert {str(p): n for p, n in found.items()} == {"m64n128k16": 2, "m64n64k16 RS": 1}
    scores, values = found
    assert (scores.clocks, scores.shared_bytes) == (64, 2048 + 32 * 128)
    assert (values.clocks, values.shared_bytes) == (32, 32 * 64)
    with pytest.raises(ValueError, match="HMMA.16816"):
        hopper_model.Product.of(sass.Instruction(0, "HMMA.16816.F32 R4, R5, R6, R4"))


def test_clocks_of_each_resource() -> None:
    lines = [
        *SCORES,
        *VALUES,
        "MUFU.EX2 R1, R1",
        "FFMA R1, R1, R2, R3",
        "IMAD R1, R2, R3, R4",
        "@P0 FMNMX R1, R2, R3, !PT",
    ]
    lines += ["UIADD3 UR4, UR5, 0x1, URZ", "LDS.128 R4, [R5]", "SHFL.BFLY PT, R1, R2, 0x1, 0x1f"]
    found = hopper_model.clocks(path(lines), consumers=2, stage_bytes=2048)
    assert list(found) == list(hopper_model.RESOURCES)
    assert found["tensor"] == 64 + 64 + 32
    assert (found["MUFU"], found["FMA"], found["ALU"], found["issue"]) == (8, 3, 2, len(lines))
    read = 2 * (2048 + 32 * 128) + 32 * 64 + 4 * (32 * 16 + 128)
    assert found["shared"] == (read + 2048 / 2) / 128
    assert found["L2"] == 2048 / 2 / hopper_model.L2
    both = hopper_model.clocks(path(lines * 2), consumers=2, stage_bytes=2048, rounds=2)
    assert both == found


def test_what_no_product_runs_beside() -> None:
    exponential, last, all_done = "MUFU.EX2 R1, R1", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    hidden = [*SCORES, *VALUES, last, exponential, exponential, all_done, "FMUL R1, R1, R2"]
    assert hopper_model.waits(path(hidden)) == hopper_model.Waits(exposed_exponentials=0, exposed=1)
    late = [*SCORES, *VALUES, last, exponential, all_done, exponential, "FMUL R1, R1, R2"]
    assert hopper_model.waits(path(late)) == hopper_model.Waits(exposed_exponentials=1, exposed=2)
    # A product that was issued at the end of the round before is pending, and one whose group is still open runs.
    carried = [exponential, all_done, SCORES[0], exponential, SCORES[1]]
    assert hopper_model.waits(path(carried)).exposed_exponentials == 0


def test_the_loop_is_the_one_without_masks_and_with_all_products() -> None:
    masked = [*SCORES, "FSEL R1, R2, R3, P0", "@P1 BRA 0x0000"]
    plain = [*SCORES, "@P2 BRA 0x0040"]
    half = [SCORES[1], "@P3 BRA 0x0070"]
    flops = 2 * 64 * 128 * 32
    round_, blocks = hopper_report.main_loop(program([*masked, *plain, *half, "EXIT"]), flops)
    assert (round_.issued, blocks) == (3, 1)
    assert [i.text for i in round_.path] == plain
    round_, blocks = hopper_report.main_loop(program([*SCORES, *SCORES, "@P0 BRA 0x0000", "EXIT"]), flops)
    assert (round_.issued, blocks) == (5, 2)
    with pytest.raises(cubin.MissingTool, match="no loop with"):
        hopper_report.main_loop(program([*half, "EXIT"]), flops)


def row(**changes: Any) -> dict[str, Any]:
    clocks = dict.fromkeys(hopper_model.RESOURCES, 100.0) | {"tensor": 1024.0}
    return {
        "direction": "forward", "part": "", "head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16",
        "issued": 486.0, "consumers": 2,
        "pairs": 128 * 128, "products": {"m64n128k16": 16}, "groups": 2.0, "exponentials": 66.0,
        "exposed_exponentials": 0.0, "exposed": 0.0, "clocks": clocks, "bound": "tensor",
    } | changes  # fmt: skip


def backward(clocks: float) -> list[dict[str, Any]]:
    """Both kernels at head dim 128, 64 rows or keys a warpgroup by 64: 1024 and 768 clocks of the tensor cores."""
    shared = dict.fromkeys(hopper_model.RESOURCES, 0.0)
    keys = row(direction="backward", part="dK dV", pairs=8192, clocks=shared | {"tensor": 1024.0, "shared": clocks})
    query = row(direction="backward", part="dQ", pairs=8192, clocks=shared | {"tensor": 768.0})
    return [keys, query]


def test_faults() -> None:
    assert hopper_report.faults([row()]) == []
    assert "531 instructions a block, at most 530" in hopper_report.faults([row(issued=531.0)])[0]
    assert hopper_report.faults([row(issued=700.0, head_dim=256, head_dim_v=256)]) == []
    assert hopper_report.faults([row(issued=700.0, direction="forward, few rows")]) == []
    assert "2 of 66 exponentials" in hopper_report.faults([row(exposed_exponentials=2.0)])[0]
    assert "group of its own" in hopper_report.faults([row(groups=16.0)])[0]
    slow = row(clocks=row()["clocks"] | {"L2": 1300.0}, bound="L2")
    assert "78.8%" in hopper_report.faults([slow])[0] and "L2" in hopper_report.faults([slow])[0]


def test_the_backward_is_judged_by_both_kernels_and_by_what_one_pass_needs() -> None:
    (total,) = hopper_report.totals(backward(0.0))
    assert total["complete"] and total["busy"] == 1 and total["computed"] == pytest.approx(7 / 5)
    assert total["useful"] == pytest.approx(5 / 7)
    assert hopper_report.faults(backward(1050.0)) == []
    assert any("70% were wanted" in fault for fault in hopper_report.faults(backward(1200.0)))
    assert not hopper_report.totals(backward(0.0)[:1])[0]["complete"]


def test_warpgroups_that_ask_for_more_registers_than_there_are() -> None:
    good = {
        "pass": "forward, wgmma", "kernel": "hopper_forward_kernel", "arguments": "", "arch": "sm_90a", "head_dim": 256,
        "head_dim_v": 256, "stack": 0, "blocks": 1, "used": True, "registers": 168, "threads": 384,
        "wanted_registers": 128 * (40 + 2 * 232),
    }  # fmt: skip
    plan = {("forward, wgmma", "256", "9.0, 10.0"): 1}
    assert ptxas_report.faults([good], plan) == []
    assert "ask for 65536 registers" in ptxas_report.faults([{**good, "wanted_registers": 65536}], plan)[0]
    assert "stack frame" in ptxas_report.faults([{**good, "stack": 8}], plan)[0]
