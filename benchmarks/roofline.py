"""What a main loop can reach on a GPU, from the instructions that it issues: a model, not a measurement.

Four quarters of a multiprocessor share its shared memory; for each resource the model takes the clocks that one round of
all warps of a block needs if nothing else did, and says that the round takes as long as the longest. Latencies and waits
are not in it, so it is an upper bound.

Sources of the rates: NVIDIA A100 and H100 whitepapers (tensor-core, special-function and clock rates); shared memory
128 bytes a clock on both; L2 about 47 (A100) and 28 (H100) bytes a clock for each multiprocessor, from microbenchmarks; on
Hopper, mma.sync reaches about 63 % of the rate of wgmma (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking", 2024).
"""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True)
class GPU:
    """hmma: clocks that a multiprocessor needs for one mma.m16n8k16 (4096 flops). ideal: the same at the rate of the
    peak. l2: bytes a clock. peak: TFLOP/s, dense, 16 bits."""

    name: str
    hmma: float
    ideal: float
    l2: float
    peak: float
    special: float = 16.0  # MUFU lanes a clock
    shared: float = 128.0  # bytes a clock
    issue: float = 4.0  # instructions a clock


A100 = GPU("A100", 2.0, 2.0, 47.0, 312.0)
H100 = GPU("H100, H200", 1.0 / 0.63, 1.0, 28.0, 989.0)
FLOPS = 4096  # of one mma.m16n8k16

_SHARED = ("LDSM", "LDS", "STS", "LDGSTS", "STSM")


def shared_bytes(opcodes: Counter[str]) -> float:
    """Bytes that a warp moves to and from shared memory, without bank conflicts."""
    total = 0.0
    for opcode, count in opcodes.items():
        name, *modifiers = opcode.split(".")
        if name not in _SHARED:
            continue
        if name in ("LDSM", "STSM"):
            each = 128 * int(next((m for m in reversed(modifiers) if m in ("1", "2", "4")), "1"))
        else:
            each = 32 * next((int(m) // 8 for m in modifiers if m in ("64", "128")), 4)
        total += count * each
    return total


def clocks(opcodes: Counter[str], warps: int, gpu: GPU) -> dict[str, float]:
    """Clocks of one round of a block's warps, by resource."""
    counts: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        counts[opcode.split(".")[0]] += count
    copied = sum(32 * next((int(m) // 8 for m in o.split(".") if m in ("64", "128")), 4) * n
                 for o, n in opcodes.items() if o.startswith("LDGSTS"))  # fmt: skip
    return {
        "tensor": warps * counts["HMMA"] * gpu.hmma,
        "shared": warps * shared_bytes(opcodes) / gpu.shared,
        "special": warps * counts["MUFU"] * 32 / gpu.special,
        "issue": warps * sum(counts.values()) / gpu.issue,
        "l2": warps * copied / gpu.l2,
    }


def bound(found: dict[str, float]) -> str:
    """The resource that decides."""
    return max(found, key=lambda name: found[name])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A kernel's main loop: what a warp issues in one round, the warps of a block, and the (query row, key) pairs that the
    block serves in it."""

    opcodes: Counter[str]
    warps: int
    pairs: int


def reach(loops: list[Loop], flops_per_pair: float, gpu: GPU) -> tuple[float, list[str]]:
    """(TFLOP/s at most, what bounds each loop) of kernels that run one after the other over the same pairs.

    flops_per_pair: those that are useful, for one query head.
    """
    taken, bounds = 0.0, []
    for loop in loops:
        found = clocks(loop.opcodes, loop.warps, gpu)
        bounds.append(bound(found))
        taken += max(found.values()) / loop.pairs
    return gpu.peak * (flops_per_pair / FLOPS * gpu.ideal) / taken, bounds
