#!/usr/bin/env python3
"""Verifies packattn and its peers against float64, then times them interleaved in one process.

    python benchmarks/bench_attention.py --device cpu --json results.json
    python benchmarks/bench_attention.py --device cpu --quick

How to read the numbers, and what is skipped: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from configurations import (
    CASES,
    DIRECTIONS,
    DTYPES,
    IMPLEMENTATIONS,
    SHAPES,
    TOKENS,
    Configuration,
    configurations,
)

ISA_VARIABLES = {
    "avx2": {
        "PACKATTN_CPU_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        # Compiled FlexAttention follows ATEN_CPU_CAPABILITY in the vectors it writes, but its compiler's flag is
        # -march=native. And its caches do not know of either: code generated for AVX-512 and found there is compiled
        # for AVX2 vectors and gives wrong results (torch 2.13), hence a cache of its own.
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_avx2"),
    },
}
"""Environment that holds packattn, every library inside torch, and torch's compiler to one instruction set."""

LEFT_OUT_WHEN_LONG = {
    "sdpa_dense": "sdpa_dense at 16384 tokens (its mask is tokens x tokens: 16 times the work of 4096)",
    "sdpa_padded": "sdpa_padded for 1x16384 (one document needs no padding: it is the call of sdpa_loop)",
}
"""Not measured past 4096 tokens, sdpa_padded for one document only."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = {"action": "extend", "nargs": "+"}
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="float32, 8/8 heads, D = 64, 4096 tokens: under a minute")
    parser.add_argument("--full", action="store_true", help="16384 tokens in every head shape too, not in one only")
    parser.add_argument("--threads", type=int, default=2, help="for packattn and torch (default: 2)")
    parser.add_argument("--isa", choices=ISA_VARIABLES, help="hold packattn and torch to this instruction set")
    parser.add_argument("--dtype", choices=DTYPES, **several)
    parser.add_argument("--head-dim", type=int, choices=sorted({d for *_, d in SHAPES}), **several)
    parser.add_argument("--heads", choices=sorted({f"{q}/{kv}" for q, kv, _ in SHAPES}), **several)
    parser.add_argument("--case", choices=CASES, **several)
    parser.add_argument("--tokens", type=int, choices=TOKENS, **several)
    parser.add_argument("--direction", choices=DIRECTIONS, **several)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, **several)
    parser.add_argument("--rounds", type=int, help="most samples of one call (default: 15, quick: 7)")
    parser.add_argument("--seconds", type=float, help="aim of sampling time per call (default: 1.5, quick: 0.3)")
    parser.add_argument(
        "--patience",
        type=float,
        help="most seconds spent on repeating samples that other processes disturbed (default: 120, quick: 10)",
    )
    options = parser.parse_args(arguments)
    quick = options.quick
    options.dtype = options.dtype or (["float32"] if quick else DTYPES)
    options.head_dim = options.head_dim or ([64] if quick else [64, 128])
    options.heads = options.heads or (["8/8"] if quick else ["8/8", "8/2"])
    options.tokens = sorted(set(options.tokens or ([4096] if quick else TOKENS)))
    options.case = options.case or list(CASES)
    options.direction = options.direction or DIRECTIONS
    options.implementation = options.implementation or IMPLEMENTATIONS
    options.rounds = options.rounds or (7 if quick else 15)
    options.seconds = options.seconds or (0.3 if quick else 1.5)
    options.patience = (10.0 if quick else 120.0) if options.patience is None else options.patience
    return options


def keep_freed_memory() -> None:
    """Starts this program again with a malloc that keeps what is freed, for everybody whom it times.

    By default glibc gives large blocks back to the system and takes page faults to get them again: a third of the time
    of a backward over 4096 tokens, and an accident of block sizes. Elsewhere the variables do nothing.
    """
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.environ.update(MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_MMAP_THRESHOLD_=str(1 << 40))
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.isa:
        os.environ.update(ISA_VARIABLES[options.isa])  # read when torch is first imported, which is below

    import torch
    from tqdm import tqdm

    from report import bar_table, ratio_tables
    from timing import Clock

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    header = environment(options.threads)
    print(", ".join(f"{name} {value}" for name, value in header.items()))
    if header["isa"] == "none":
        print("WARNING: packattn has no compiled CPU library here; its plain-PyTorch reference is what is timed")

    chosen = list(
        configurations(
            dtypes=options.dtype, head_dims=options.head_dim, heads=options.heads, cases=options.case,
            tokens=options.tokens, full=options.full,
        )
    )  # fmt: skip
    if not options.full and max(options.tokens) > 4096 and (128 in options.head_dim or "8/2" in options.heads):
        print("skipped: 16384 tokens for heads 8/2 and D = 128 (--full has them)")
    clock = Clock(options.patience)
    rows: list[dict[str, Any]] = []
    complaints: list[str] = []
    skipped: dict[str, None] = {}
    with tqdm(chosen, unit="case", disable=None) as progress:
        for number, configuration in enumerate(progress, 1):
            progress.set_description(str(configuration))
            if progress.disable:  # not a terminal: a line for each case, so that a log shows how far it is
                print(f"[{number}/{len(chosen)}] {configuration}", file=sys.stderr, flush=True)
            rows += measure(configuration, options, clock, complaints, skipped)
            if options.json:  # after every case, so that an interrupted run leaves what it has
                options.json.parent.mkdir(parents=True, exist_ok=True)
                write_rows(options.json, [row | header for row in rows])

    print(ratio_tables(rows))
    print(bar_table(rows))
    for line in skipped:
        print(f"skipped: {line}")
    print(f"samples taken again because other processes used the CPU: {clock.repeated}", end="")
    print(", then no longer watched: the machine was too busy" if clock.given_up else "")
    for line in complaints:
        print(f"WRONG, not timed: {line}")
    return 1 if any(line.startswith("packattn,") for line in complaints) else 0


def measure(
    configuration: Configuration,
    options: argparse.Namespace,
    clock: Any,
    complaints: list[str],
    skipped: dict[str, None],
) -> list[dict[str, Any]]:
    """The rows of one configuration: verify, then time what was right."""
    import time

    from implementations import Inputs, build, matrix_product
    from timing import Job, run_interleaved, wanted_samples
    from verification import TOLERANCE, expected, verify

    inputs = Inputs.random(configuration)
    want = expected(configuration, inputs)
    jobs: list[Job] = []

    def add(name: str, direction: str, call: Any, seconds: float = 0.0) -> None:
        if seconds < 1 or name == "flex":  # a first call is slower, for flex by its compilation
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        least = 1 if name in ("sdpa_dense", "sdpa_padded") else 3
        most = 2 if name == "sdpa_dense" else options.rounds
        samples = wanted_samples(seconds, budget=options.seconds, most=max(most, least), least=least)
        jobs.append(Job(name, direction, call, samples))

    for name in options.implementation:
        if name == "mm":
            continue
        left_out = ["sdpa_dense"] + (["sdpa_padded"] if len(configuration.lengths) == 1 else [])
        if configuration.tokens > 4096 and name in left_out:
            skipped[LEFT_OUT_WHEN_LONG[name]] = None
            continue
        implementation = build(name, configuration, inputs)
        backward = implementation.has_backward and "forward_backward" in options.direction
        error, seconds = verify(implementation, want, backward=backward)
        if not error <= TOLERANCE[configuration.dtype]:
            complaints.append(f"{name}, {configuration}: off by {error:.1e} of the largest value")
            continue
        if "forward" in options.direction:
            add(name, "forward", implementation.forward, seconds["forward"])
        if backward:
            add(name, "forward_backward", implementation.forward_backward, seconds["forward_backward"])
    mm_flops: dict[str, float] = {}
    if "mm" in options.implementation:
        for name, dtype in {"mm": configuration.dtype, "mm_float32": "float32"}.items():
            if name == "mm" or configuration.dtype != "float32":
                product, mm_flops[name] = matrix_product(dtype)
                add(name, "", product)
    if not jobs:
        return []
    run_interleaved(jobs, clock)

    rows = []
    for job in jobs:
        # A matrix product has no direction: its time stands beside both.
        for direction in [job.direction] if job.direction else options.direction:
            flops = mm_flops.get(job.name) or configuration.useful_flops(direction)
            rows.append({
                "case": configuration.case,
                "tokens": configuration.tokens,
                "head_dim": configuration.head_dim,
                "heads": configuration.heads,
                "implementation": job.name,
                "direction": direction,
                "dtype": configuration.dtype,
                "median_ms": round(job.median_seconds * 1e3, 4),
                "useful_gflops": round(flops / job.median_seconds / 1e9, 3),
                "samples": len(job.times),
            })  # fmt: skip
    return rows


def environment(threads: int) -> dict[str, Any]:
    """Machine, versions and date: repeated in every row, so that the file stays a plain list of rows."""
    import torch
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    import packattn
    from packattn import _library

    compiled = _library.CPU.loaded and _library.extension is not None
    return {
        "cpu": cpu_model(),
        "threads": threads,
        "isa": _library.extension.cpu_isa() if compiled else "none",
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "flex_isa": str(pick_vec_isa()),
        "torch": torch.__version__,
        "packattn": packattn.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A JSON list with one row on each line."""
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
