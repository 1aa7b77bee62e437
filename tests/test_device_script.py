"""The device script: its problems are what it says, a wrong result is not timed, and a stage that fails takes nothing from
the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "benchmarks" / "device"
if not DEVICE.exists():
    pytest.skip("the device script is in benchmarks/", allow_module_level=True)
sys.path[:0] = [str(DEVICE), str(DEVICE.parent)]

import bench
import goals
import peers
import problems
import stages

import packattn
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
    first = [(c.case, c.tokens) for c in chosen[:12]]  # what the goals ask for comes first
    assert {c.head_dims for c in chosen[:12]} == {"128"} and {c.heads for c in chosen[:12]} == {goals.HEADS}
    assert set(first) == {(mix, total) for mix in (goals.MIX, "one") for total in goals.TOTALS}


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


def test_families_are_implementations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.with_families(["packattn", "varlen"], ["sm80", "sm90"]) == ["packattn sm80", "packattn sm90", "varlen"]
    assert bench.with_families(["packattn"], []) == ["packattn"]
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "auto")
    seen = []
    real = packattn.attention

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(os.environ["PACKATTN_CUDA_KERNEL"])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(os.environ["PACKATTN_CUDA_KERNEL"])
            return gradient

    monkeypatch.setattr(packattn, "attention", lambda *given: Watched.apply(real(*given)))
    c = problems.problem("tiny", 68, (64, 64), (2, 1), "cpu")
    for name in ("packattn sm80", "packattn sm90"):
        implementation = peers.build(name, c, bench.Inputs.random(c))
        implementation.forward()
        implementation.backward()()
        implementation.forward_backward()
        for _, call in bench.calls(implementation):
            call()
    assert seen == ["sm80"] * 8 + ["sm90"] * 8
    assert os.environ["PACKATTN_CUDA_KERNEL"] == "auto"
    monkeypatch.delenv("PACKATTN_CUDA_KERNEL")
    with peers.kernel_family("sm90"):
        pass
    assert "PACKATTN_CUDA_KERNEL" not in os.environ


def rate(implementation: str, tflops: float, **changes: Any) -> dict[str, Any]:
    return {
        "mix": "mixed", "tokens": 32768, "heads": "64/8", "head_dim": 128, "head_dim_v": 128, "status": "ok",
        "direction": "forward", "implementation": implementation, "tflops": tflops,
    } | changes  # fmt: skip


def test_goals_stand_beside_the_figures() -> None:
    rows = [
        rate("packattn sm80", 300.0), rate("packattn sm90", 560.0), rate("varlen", 350.0), rate("fa4", 600.0),
        rate("sdpa_cudnn", 640.0, mix="one"), rate("sdpa_flash", 900.0, mix="one"),
        rate("packattn sm90", 400.0, direction="backward"),
        rate("sdpa_cudnn", 400.0, mix="one", direction="backward", heads="16/16"),
        rate("packattn sm90", 700.0, head_dim=64, head_dim_v=64),
    ]  # fmt: skip
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in goals.table(rows).splitlines()}
    forward = [cell.strip() for cell in lines["forward", "32768"].split("|")]
    assert forward[3:7] == ["560, sm90", "1.60, reached", "0.93, MISSED", "0.88, MISSED (0.90)"]
    backward = lines["backward", "32768"]
    assert "1.00, reached (0.90) (cuDNN at 16/16 heads)" in backward and backward.count("not measured") == 2
    assert lines["forward", "4096"].count("not measured") == 4
    assert sum(key[:1] in (("forward",), ("backward",)) for key in lines) == 2 * len(goals.TOTALS)


def bench_on_cpu(out: Path, *more: str) -> int:
    return bench.main(["--out", str(out), "--device", "cpu", "--tiny", "--each", "0.0001", *more])


def test_a_run_goes_on_without_what_broke_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of CUDA's ends the run; the next one keeps what was measured, and says why it has less."""
    chosen = problems.problems("cpu", True)[:3]
    monkeypatch.setattr(bench, "problems", lambda device, tiny: chosen)
    real = bench.build

    def breaks(name: str, c: Any, inputs: Any) -> Any:
        if name == "packattn sm90" and c is chosen[1][0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(name, c, inputs)

    monkeypatch.setattr(bench, "build", breaks)
    assert bench_on_cpu(tmp_path, "--families", "sm80", "sm90") == 4
    assert stages.unfinished(tmp_path) == str(chosen[1][0])
    kept = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {"packattn sm80", "packattn sm90"} <= {r["implementation"] for r in kept if r["status"] == "ok"}
    assert bench_on_cpu(tmp_path, "--families", "sm80", "--resume", "--note", "the sm_90a kernels are left out: x") == 0
    assert stages.unfinished(tmp_path) == ""
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows[: len(kept)] == kept
    of = {(r["mix"], r["tokens"]): set() for r in rows}
    for r in rows:
        of[r["mix"], r["tokens"]].add(r["implementation"])
    assert ["packattn sm90" in of[c.case, c.tokens] for c, _ in chosen] == [True, False, False]
    assert all("packattn sm80" in of[c.case, c.tokens] for c, _ in chosen)
    table = (tmp_path / "table.md").read_text()
    assert "note the sm_90a kernels are left out: x" in table and "### Goals" in table


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path[:0] = [{str(DEVICE)!r}, {str(DEVICE.parent)!r}]
import bench
bench.measure = lambda *given: time.sleep(60)
bench.main(["--out", {str(tmp_path)!r}, "--device", "cpu", "--tiny", "--hangs", "1"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "Timeout" in done.stderr
    assert stages.unfinished(tmp_path) == str(problems.problems("cpu", True)[0][0])


class Recorder(stages.Runner):
    """Runs nothing: the stages named in `failing` fail."""

    def __init__(self, out: Path, failing: set[str]) -> None:
        super().__init__(out, dry=True, seconds=60)
        self.failing = failing
        self.started: dict[str, tuple[list[list[str]], dict[str, str]]] = {}

    def stage(self, name: str, seconds: float, reserve: float, commands: list[list[str]], **environment: str) -> bool:
        self.started[name] = commands, environment
        return self.done(stages.Result(name, "failed" if name in self.failing else "passed", 0.0))


def run_stages(tmp_path: Path, *failing: str, arch: str = "9.0a") -> Recorder:
    recorder = Recorder(tmp_path, set(failing))
    stages.Stages(recorder, arch, ["calls90", "attention", "attention80", "tests", "conformance90"]).run()
    return recorder


def families_of(recorder: Recorder, stage: str = "attention") -> list[str]:
    command = recorder.started[stage][0][0]
    given = command[command.index("--families") + 1 :]
    return [word for word in given if word in ("sm80", "sm90", "plain")]


def test_both_families_are_measured_where_both_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "WORK", tmp_path)
    (tmp_path / "conformance").mkdir()
    (tmp_path / "conformance" / "emulated").touch()
    good = run_stages(tmp_path / "good")
    assert families_of(good) == ["sm80", "sm90"] and "attention80" not in good.started
    assert good.started["calls90"][0][0][-2:] == ["--family", "sm90"]
    for stage, said in (("conformance90", "conformance of wgmma"), ("calls90", "small calls")):
        bad = run_stages(tmp_path / stage, stage)
        command = bad.started["attention"][0][0]
        assert families_of(bad) == ["sm80"] and said in command[command.index("--note") + 1]
        assert "not hopper" in bad.started["tests"][0][0][bad.started["tests"][0][0].index("-k") + 1]
    assert "calls90" not in run_stages(tmp_path / "again", "conformance90").started
    assert families_of(run_stages(tmp_path / "ampere", arch="8.0")) == ["sm80"]
    assert families_of(run_stages(tmp_path / "turing", arch="7.5")) == ["plain"]
    # The benchmark came to a sudden end: once more without them, with what it had.
    out = tmp_path / "hung"
    out.mkdir()
    (out / "results.json").write_text(json.dumps({"unfinished": "mixed T=4096", "rows": []}))
    hung = run_stages(out, "attention")
    assert families_of(hung, "attention80") == ["sm80"]
    command = hung.started["attention80"][0][0]
    assert "--resume" in command and "mixed T=4096" in command[command.index("--note") + 1]


def test_the_limits_leave_time_for_what_follows() -> None:
    names = list(stages.LIMITS)
    assert stages.SECONDS <= 540  # nine minutes, the start of the script included
    for name, (most, reserve) in stages.LIMITS.items():
        assert most >= 25 and 0 <= reserve < stages.SECONDS
        after = names[names.index(name) + 1 :]
        assert name == "attention80" or reserve >= sum(10 for other in after if other != "attention80"), name


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
