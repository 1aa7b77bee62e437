#!/usr/bin/env python
"""Attention on a GPU: packattn beside varlen_attn, FlashAttention, SDPA and FlexAttention, forward and backward.

    python benchmarks/device/bench.py --out FOLDER [--seconds 200] [--families sm80 sm90] [--device cuda] [--tiny]

Every implementation is compared with float64 on the first rows before it is timed; one that is wrong is named and not
timed. What is timed is the work of the device: the host runs ahead behind a delay, so that launches cost nothing, and
the L2 cache is overwritten before each sample. All implementations of a problem take turns; medians count. "host" is
how long the host takes to start a call, beside that. TFLOP/s count visible scores only (configurations.py).

Each of packattn's families of kernels is an implementation of its own ("packattn sm90"). Problems come in order of
importance until the seconds are used up; what was not reached is said. Writes results.json and table.md after every
problem. Exit status 1 if packattn was wrong somewhere.

A problem that does not come back within --hangs seconds ends the program, as does an error after which CUDA does
nothing more in this process; results.json names the problem under "unfinished". --resume keeps what was measured before
and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import goals
import torch
from peers import Unavailable, Within, build, prepare_compiler
from problems import problems

import packattn
from configurations import Configuration
from implementations import Implementation, Inputs
from timing import Clock, Job, run_interleaved, wanted_samples
from verification import TOLERANCE, expected, verify

CHECKED_ROWS = 1024
DELAY_CYCLES = 2_000_000  # about a millisecond: longer than the host needs to start a call
FLUSH_BYTES = 256 << 20


class DeviceClock:
    """Takes samples of what the device does."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def sample(self, call: Call) -> float:
        """Seconds between the call's first and last work on the device."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with call.around():
            self.flush.zero_()
            torch.cuda._sleep(DELAY_CYCLES)
            start.record()
            call.run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3


@dataclass
class Call:
    """What is timed, and the context that it needs, which is not: to give torch other kernels may take milliseconds."""

    run: Callable[[], object]
    around: Callable[[], contextlib.AbstractContextManager[object]]

    def __call__(self) -> object:
        with self.around():
            return self.run()


def host_seconds(call: Call, device: str, times: int = 5) -> float:
    """How long the host takes to start a call (median)."""
    taken = []
    with call.around():
        for _ in range(times):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call.run()
            taken.append(time.perf_counter() - start)
        if device == "cuda":
            torch.cuda.synchronize()
    return statistics.median(taken)


def row_of(c: Configuration, name: str, direction: str, **more: Any) -> dict[str, Any]:
    return {
        "mix": c.case,
        "tokens": c.tokens,
        "documents": len(c.lengths),
        "longest": max(c.lengths),
        "head_dim": c.head_dim,
        "head_dim_v": c.dim_v,
        "heads": c.heads,
        "dtype": c.dtype,
        "implementation": name,
        "direction": direction,
        **more,
    }


class Broken(RuntimeError):
    """CUDA reports this error to every call from now on."""


def with_families(names: list[str], families: list[str]) -> list[str]:
    """ "packattn" becomes one implementation for each family."""
    ours = [f"packattn {family}" for family in families] or ["packattn"]
    return [one for name in names for one in (ours if name == "packattn" else [name])]


def measure(c: Configuration, names: list[str], clock: Any, seconds: float) -> list[dict[str, Any]]:
    """Verify, then time, the implementations of one problem."""
    inputs = Inputs.random(c)
    want = expected(c, inputs, CHECKED_ROWS)
    rows: list[dict[str, Any]] = []
    jobs: list[tuple[Job, float, float]] = []
    for name in names:
        try:
            implementation = build(name, c, inputs)
            error, _ = verify(implementation, want, backward=implementation.has_backward)
        except Unavailable as reason:
            rows.append(row_of(c, name, "", status=f"not there: {reason}"))
            continue
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
            if "CUDA error" in str(refusal):
                raise Broken(f"{name}: {refusal}") from refusal
            what = "WRONG" if name.startswith("packattn") else "refused"
            rows.append(row_of(c, name, "", status=f"{what}: {str(refusal).strip().splitlines()[0][:200]}"))
            continue
        if not error <= TOLERANCE[c.dtype]:
            rows.append(row_of(c, name, "", status=f"WRONG: off by {error:.1e} of the largest value", error=error))
            continue
        for direction, call in calls(implementation):
            call()  # warms up
            first = clock.sample(call)
            samples = wanted_samples(first, budget=seconds, most=25, least=5)
            jobs.append((Job(name, direction, call, samples), error, host_seconds(call, c.device)))
    if jobs:
        run_interleaved([job for job, _, _ in jobs], clock)
    for job, error, host in jobs:
        flops = c.useful_flops(job.direction)
        rows.append(
            row_of(
                c,
                job.name,
                job.direction,
                status="ok",
                error=error,
                median_ms=round(job.median_seconds * 1e3, 5),
                least_ms=round(min(job.times) * 1e3, 5),
                tflops=round(flops / job.median_seconds / 1e12, 3),
                host_us=round(host * 1e6, 1),
                samples=len(job.times),
            )
        )
    return rows


def calls(implementation: Implementation) -> list[tuple[str, Call]]:
    around = implementation.around if isinstance(implementation, Within) else contextlib.nullcontext
    found = [("forward", Call(functools.partial(Implementation.forward, implementation), around))]
    if implementation.has_backward:
        with around():
            found.append(("backward", Call(Implementation.backward(implementation), around)))
    return found


def environment(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "packattn": packattn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "device": "CPU, to try the script" if device == "cpu" else torch.cuda.get_device_name(),
    }
    if device == "cuda":
        from packattn import _library

        properties = torch.cuda.get_device_properties(0)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["multiprocessors"] = properties.multi_processor_count
        facts["kernels"] = "compiled" if _library.CUDA.loaded else f"plain PyTorch: {_library.CUDA.missing}"
    return facts


NAMES = {
    "packattn": "packattn",
    **{f"packattn {family}": f"packattn {family}" for family in ("plain", "sm80", "sm90")},
    "varlen": "varlen_attn",
    "varlen_fa3": "varlen_attn, FA3",
    "varlen_fa4": "varlen_attn, FA4",
    "fa3": "flash-attn 3",
    "fa4": "flash-attn 4",
    "flex": "FlexAttention",
    "sdpa_flash": "SDPA flash, dense",
    "sdpa_cudnn": "SDPA cuDNN, dense",
}


def tables(rows: list[dict[str, Any]]) -> str:
    """TFLOP/s, a table for each head dim, number of heads and direction; the dense ceilings stand beside every mix."""
    timed = [row for row in rows if row["status"] == "ok"]
    lines: list[str] = []
    groups = dict.fromkeys((r["head_dim"], r["head_dim_v"], r["heads"], r["direction"]) for r in timed)
    for d, dv, heads, direction in groups:
        group = [
            r
            for r in timed
            if (r["head_dim"], r["head_dim_v"], r["heads"], r["direction"]) == (d, dv, heads, direction)
        ]
        columns = [name for name in NAMES if any(r["implementation"] == name for r in group)]
        dense = {
            (r["tokens"], r["implementation"]): r["tflops"] for r in group if r["implementation"].startswith("sdpa_")
        }
        lines += ["", f"### {direction}, head dim {d if d == dv else f'{d}/{dv}'}, heads {heads}, TFLOP/s", ""]
        lines.append(
            "| documents | tokens | " + " | ".join(NAMES[n] for n in columns) + " | of the best dense | host, µs |"
        )
        lines.append("|---|--:|" + "--:|" * (len(columns) + 2))
        for mix, tokens in sorted(dict.fromkeys((r["mix"], r["tokens"]) for r in group), key=lambda x: (x[0], x[1])):
            here = {r["implementation"]: r for r in group if (r["mix"], r["tokens"]) == (mix, tokens)}
            cells = []
            for name in columns:
                value = here[name]["tflops"] if name in here else dense.get((tokens, name))
                cells.append("" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.3g}")
            ceiling = max((v for (t, _), v in dense.items() if t == tokens), default=None)
            ours = max(
                (row for name, row in here.items() if name.startswith("packattn")),
                key=lambda row: row["tflops"],
                default=None,
            )
            share = f"{ours['tflops'] / ceiling:.0%}" if ours and ceiling else ""
            count = next(iter(here.values()))["documents"]
            lines.append(
                f"| {mix}, {count} | {tokens} | " + " | ".join(cells) + f" | {share} | {ours['host_us']:.0f} |"
                if ours
                else f"| {mix}, {count} | {tokens} | " + " | ".join(cells) + " | | |"
            )
    missing = dict.fromkeys(
        f"{NAMES[r['implementation']]}, head dim {r['head_dim']}/{r['head_dim_v']}, {r['mix']}, {r['tokens']} tokens: "
        f"{r['status']}"
        for r in rows
        if r["status"] != "ok" and not r["status"].startswith("not there")
    )
    absent = dict.fromkeys(
        f"{NAMES[r['implementation']]}: {r['status']}" for r in rows if r["status"].startswith("not there")
    )
    return "\n".join([*lines, "", *(f"- {line}" for line in (*absent, *missing))])


class Results:
    """What was measured, on the disk after every problem."""

    def __init__(self, folder: Path, facts: dict[str, Any], resume: bool) -> None:
        self.folder, self.facts = folder, facts
        self.rows: list[dict[str, Any]] = []
        if resume and self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            self.rows = before["rows"]
            self.facts = before["environment"] | facts

    @property
    def path(self) -> Path:
        return self.folder / "results.json"

    def have(self, c: Configuration, names: list[str]) -> bool:
        """Whether all of them were tried on this problem."""
        same = {
            r["implementation"]
            for r in self.rows
            if (r["mix"], r["tokens"], r["heads"], r["head_dim"], r["head_dim_v"])
            == (c.case, c.tokens, c.heads, c.head_dim, c.dim_v)
        }
        return same >= set(names)

    def write(self, unfinished: str = "") -> str:
        """unfinished: the problem that is now measured. Returns the tables."""
        text = json.dumps({"environment": self.facts, "unfinished": unfinished, "rows": self.rows}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")
        head = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        shown = f"{tables(self.rows)}\n\n{goals.table(self.rows)}"
        (self.folder / "table.md").write_text(f"{head}\n{shown}\n", encoding="utf-8")
        return shown


def watch(seconds: float) -> None:
    """Ends the process unless it is called again in time; 0: no longer. Nothing else ends it when a kernel hangs."""
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    else:
        faulthandler.cancel_dump_traceback_later()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and table.md")
    parser.add_argument("--seconds", type=float, default=200, help="when to stop (default: 200)")
    parser.add_argument("--each", type=float, default=0.08, help="seconds of samples for each call (default: 0.08)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="*", default=[], help="of packattn's kernels: sm80, sm90, plain")
    parser.add_argument("--note", help="what the tables are to say of this run")
    parser.add_argument("--hangs", type=float, default=60, help="seconds for one problem (FlexAttention: twice that)")
    parser.add_argument("--resume", action="store_true", help="go on after what results.json has")
    parser.add_argument("--tiny", action="store_true", help="a few small problems, to try the script")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    prepare_compiler()
    facts = environment(options.device)
    if options.note:
        facts["note"] = options.note
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    clock: Any = DeviceClock() if options.device == "cuda" else Clock(patience=0)
    results = Results(options.out, facts, options.resume)

    chosen = [(c, with_families(names, options.families)) for c, names in problems(options.device, options.tiny)]
    broken = 0
    longest = 0.0
    for number, (c, names) in enumerate(chosen, 1):
        if results.have(c, names):
            continue
        began = time.monotonic()
        # FlexAttention compiles, anew for each shape.
        if began + (40 if "flex" in names and options.device == "cuda" else longest) > end:
            print(f"not reached for want of time: {c}", flush=True)
            continue
        results.write(unfinished=str(c))
        watch(options.hangs * (2 if "flex" in names else 1))
        rows: list[dict[str, Any]] = []
        try:
            rows = measure(c, names, clock, options.each)
        except Exception as error:  # noqa: BLE001  (the rest is to be measured too)
            broken += 1
            ours = next(name for name in names if name.startswith("packattn"))
            rows = [row_of(c, ours, "", status=f"WRONG: {type(error).__name__}: {str(error)[:500]}")]
            if isinstance(error, Broken) or "CUDA error" in str(error):
                print(f"[{number}/{len(chosen)}] {c}: {error}", flush=True)
                return 4
        finally:
            watch(0)
        results.rows += rows
        if "flex" not in names:
            longest = max(longest, time.monotonic() - began)
        shown = [f"{r['implementation']} {r['direction']} {r['tflops']}" for r in rows if r["status"] == "ok"]
        print(f"[{number}/{len(chosen)}] {c}: {', '.join(shown)}", flush=True)
        for row in rows:
            if row["status"].startswith("WRONG"):
                print(f"    {row['implementation']}: {row['status']}", flush=True)
        results.write()
    print(results.write())
    wrong = [r for r in results.rows if r["implementation"].startswith("packattn") and r["status"].startswith("WRONG")]
    print(f"\n{len(wrong)} problems on which packattn was wrong, {broken} of them by an exception")
    return 1 if wrong or not results.rows else 0


if __name__ == "__main__":
    sys.exit(main())
