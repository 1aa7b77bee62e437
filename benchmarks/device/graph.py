#!/usr/bin/env python
"""A CUDA graph of metadata, forward and backward, replayed on documents that it was not recorded with.

    python benchmarks/device/graph.py --out FOLDER [--device cuda]

Every replay must give the bits of the same calls made one by one. Writes graph.json; exit status 1 if a replay differs.
On the CPU, where there are no graphs, the same function is simply called again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from problems import mixed, one, skew, tiny
from torch import Tensor

import packattn

HEADS, HEAD_DIM = (32, 8), 128


class Step:
    """Metadata, forward and backward over buffers that stay where they are."""

    def __init__(self, total: int, device: str, max_segments: int) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(heads: int) -> Tensor:
            shape = (total, heads, HEAD_DIM)
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        self.positions = torch.zeros(total, dtype=torch.int64, device=device)
        self.leaves = [draw(heads).requires_grad_() for heads in (HEADS[0], HEADS[1], HEADS[1])]
        self.dout = draw(HEADS[0])
        self.max_segments = max_segments

    def __call__(self) -> list[Tensor]:
        packing = packattn.Packing.from_position_ids(self.positions, max_segments=self.max_segments)
        out = packattn.attention(*self.leaves, packing)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]


def record(step: Step, device: str) -> tuple[Callable[[], object], list[Tensor]]:
    """(replay, the tensors that hold its results)."""
    if device == "cpu":
        results = [t.clone() for t in step()]

        def again() -> None:
            for kept, new in zip(results, step(), strict=True):
                kept.copy_(new)

        return again, results
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def seconds(call: Callable[[], object], device: str, times: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    total = 8192 if options.device == "cuda" else 256
    packings = {"one": one(total), "mixed": mixed(total), "34 tokens": tiny(total), "skew": skew(total)}
    step = Step(total, options.device, max(map(len, packings.values())))

    def write(lengths: tuple[int, ...]) -> None:
        step.positions.copy_(packattn.Packing.from_lengths(lengths).position_ids)

    write(packings["one"])
    replay, results = record(step, options.device)
    rows, differ = [], 0
    for name, lengths in packings.items():
        write(lengths)
        want = [t.clone() for t in step()]
        replay()
        same = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(results, want, strict=True))
        differ += not same
        times = 10 if options.device == "cuda" else 1
        row = {
            "documents": name,
            "number": len(lengths),
            "same_bits": same,
            "replay_us": seconds(replay, options.device, times) * 1e6,
            "eager_us": seconds(step, options.device, times) * 1e6,
        }
        rows.append(row)
        print(
            f"replay on {name} ({len(lengths)} documents of {total} tokens): {'the same bits' if same else 'DIFFERS'}, "
            f"{row['replay_us']:.0f} us, eager {row['eager_us']:.0f} us",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "graph.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
