"""The device script: its problems are what it says, a wrong result is not timed, and a stage that fails takes nothing from
the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "benchmarks" / "device"
if not DEVICE.exists():
    pytest.skip("the device script is in benchmarks/", allow_module_level=True)
sys.path[:0] = [str(DEVICE), str(DEVICE.parent)]

import bench
import problems
import stages

from timing import Clock


def test_problems() -> None:
    for total in problems.TOTALS:
        for name, mix in problems.MIXES.items():
            lengths = mix(total)
            assert sum(lengths) == total and min(lengths) > 0, name
            assert lengths == mix(total), "not the same in every run"
        assert max(problems.mixed(total)) <= total // 4
        assert max(problems.skew(total)) == total // 2
    chosen = [c for c, _ in problems.problems("cpu")]
    assert {(c.head_dim, c.dim_v) for c in chosen} == set(problems.HEAD_DIMS)
    assert {c.tokens for c in chosen} == set(problems.TOTALS)
    assert chosen[0].head_dim == 128  # what models have most comes first


def test_flops_count_visible_scores() -> None:
    c = problems.problem("one", 4, (192, 128), (2, 1), "cpu")
    scores = 2 * (1 + 2 + 3 + 4)
    assert c.useful_flops("forward") == scores * (2 * 192 + 2 * 128)
    assert c.useful_flops("backward") == scores * (6 * 192 + 4 * 128)


def test_a_row_for_each_direction_and_a_reason_for_what_is_not_there() -> None:
    c = problems.problem("tiny", 128, (64, 64), (4, 2), "cpu")
    rows = bench.measure(c, ["packattn", "varlen"], Clock(patience=0), 0.001)
    timed = [r for r in rows if r["status"] == "ok"]
    assert [(r["implementation"], r["direction"]) for r in timed] == [("packattn", "forward"), ("packattn", "backward")]
    assert all(r["tflops"] >= 0 and r["median_ms"] > 0 and r["error"] < 0.02 for r in timed)
    assert [r["status"] for r in rows if r["implementation"] == "varlen"] == [
        "not there: torch's varlen_attn needs a GPU"
    ]
    text = bench.tables(rows)
    assert "| tiny, 4 | 128 |" in text and "needs a GPU" in text


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name, configuration, inputs):
        implementation = real(name, configuration, inputs)
        function = implementation.function
        implementation.function = lambda q, k, v: function(q, k, v) * 1.5
        return implementation

    real = bench.build
    monkeypatch.setattr(bench, "build", broken)
    rows = bench.measure(problems.problem("tiny", 68, (64, 64), (2, 1), "cpu"), ["packattn"], Clock(patience=0), 0.001)
    assert len(rows) == 1 and rows[0]["status"].startswith("WRONG: off by")


def test_stages_go_on_after_a_failure(tmp_path: Path) -> None:
    runner = stages.Runner(tmp_path, dry=False, seconds=60)
    python = sys.executable
    assert not runner.stage(
        "fails", 20, 0, [[python, "-c", "print('once'); raise SystemExit(3)"], [python, "-c", "print('never')"]]
    )
    child = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('started', flush=True); time.sleep(60)"
    assert not runner.stage("hangs", 6, 0, [[python, "-c", child]])
    assert runner.stage("works", 20, 0, [[python, "-c", "print('fine')"]])
    assert not runner.stage("late", 20, 58, [[python, "-c", "print('no')"]])
    runner.not_there("tool", "it was not found")
    kept = json.loads((tmp_path / "stages.json").read_text())
    assert [r["status"] for r in kept] == ["failed", "timed out", "passed", "left out", "not there"]
    log = (tmp_path / "log.txt").read_text()
    assert "once" in log and "fine" in log and "started" in log and "never" not in log.replace("print('never')", "")
    assert runner.left < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small.py", "graph.py", "metadata.py"])
def test_the_programs_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    out = [] if name == "small.py" else ["--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(DEVICE / name), "--device", "cpu", *out],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
