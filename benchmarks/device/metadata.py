#!/usr/bin/env python
"""From position ids to what attention needs: packattn on the device, beside the usual code, which waits for it twice.

    python benchmarks/device/metadata.py --out FOLDER [--device cuda]

"alone": from the call to the end of its work, nothing else running. "queued": how long the host is held up when the device
still has work to do, as in training; code that reads a value back waits for all of it. Writes metadata.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from problems import mixed, tiny
from torch import Tensor

import packattn

BUSY_CYCLES = 4_000_000  # about two milliseconds of work that is queued before the call
TOTALS = (8192, 32768, 1 << 20)


def usual(position_ids: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens and the longest document, as code for varlen kernels has it."""
    starts = (position_ids.reshape(-1) == 0).nonzero().reshape(-1)  # waits: how many there are
    cu_seqlens = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    return cu_seqlens, int(cu_seqlens.diff().max())  # waits: a number for the launch


def fixed_size(position_ids: Tensor, max_segments: int) -> tuple[Tensor, Tensor]:
    """The key ranges of packattn, with room for so many documents: nothing is read back."""
    return packattn.Packing.from_position_ids(position_ids, max_segments=max_segments).key_ranges()


def exact_size(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same with per-document tensors of the exact size: one value is read back."""
    return packattn.Packing.from_position_ids(position_ids).key_ranges()


def measure(call: Callable[[], Any], device: str) -> dict[str, float]:
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        call()
    alone, queued = [], []
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        alone.append(time.perf_counter() - start)
    for _ in range(10):
        synchronize()
        if device == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        start = time.perf_counter()
        call()
        queued.append(time.perf_counter() - start)
        synchronize()
    return {"alone_us": statistics.median(alone) * 1e6, "queued_us": statistics.median(queued) * 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    rows = []
    wrong = 0
    for total in TOTALS if options.device == "cuda" else TOTALS[:1]:
        for name, mix in (("mixed", mixed), ("34 tokens", tiny)):
            lengths = mix(total)
            packing = packattn.Packing.from_lengths(lengths)
            positions = packing.position_ids.to(options.device)
            right, count = packing.key_ranges(), len(lengths)
            calls: dict[str, Callable[[], Any]] = {
                "packattn, static shapes": lambda p=positions, n=count: fixed_size(p, n),
                "packattn, exact sizes": lambda p=positions: exact_size(p),
                "usual, cu_seqlens and longest": lambda p=positions: usual(p),
            }
            for which, call in calls.items():
                got = call()
                if which.startswith("packattn"):
                    same = all(torch.equal(a.cpu(), b) for a, b in zip(got, right, strict=True))
                else:
                    same = torch.equal(got[0].cpu(), packing.cu_seqlens) and got[1] == max(lengths)
                wrong += not same
                row = {"tokens": total, "documents": len(lengths), "mix": name, "what": which, "right": same}
                row |= measure(call, options.device)
                rows.append(row)
                print(
                    f"{total:>8} tokens, {len(lengths):>6} documents  {which:<30} alone {row['alone_us']:9.1f} us, "
                    f"queued {row['queued_us']:9.1f} us{'' if same else '  WRONG'}",
                    flush=True,
                )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metadata.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
