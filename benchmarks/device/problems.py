"""What is measured on a GPU, in order of importance: a run that is cut short has the first of it. No Torch in this file."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurations import Configuration

TOTALS = [32768, 4096, 8192, 16384, 2048, 1024]
HEAD_DIMS = [(128, 128), (64, 64), (192, 128), (256, 256)]
HEADS = (64, 8)
DTYPE = "bfloat16"


def mixed(total: int) -> tuple[int, ...]:
    """Long-tailed lengths (lognormal), none above a quarter of the total, as documents sampled from a corpus have them."""
    return _fill(total, lambda r: min(total // 4, max(16, int(r.lognormvariate(6.0, 1.3)))))


def one(total: int) -> tuple[int, ...]:
    """One document: what dense causal attention does."""
    return (total,)


def tiny(total: int) -> tuple[int, ...]:
    """Documents of 34 tokens, the mean of short instruction data."""
    return _fill(total, lambda r: 34)


def skew(total: int) -> tuple[int, ...]:
    """Half of the tokens in one document, the rest in short ones."""
    return (total // 2, *_fill(total - total // 2, lambda r: max(8, int(r.lognormvariate(4.0, 0.8)))))


def _fill(total: int, draw: object) -> tuple[int, ...]:
    generator = random.Random(total)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, draw(generator)))  # type: ignore[operator]
    return tuple(lengths)


MIXES = {"mixed": mixed, "one": one, "tiny": tiny, "skew": skew}

# "packattn" stands for each family of its kernels. SDPA computes one document of the row's length: the ceiling, beside
# which the mixes are shown.
OTHERS = ["packattn", "varlen", "varlen_fa3", "varlen_fa4", "fa3", "fa4"]
PEERS = {"one": [*OTHERS, "sdpa_flash", "sdpa_cudnn"]}


def problem(
    mix: str, total: int, dims: tuple[int, int], heads: tuple[int, int], device: str, dtype: str = DTYPE
) -> Configuration:
    d, dv = dims
    documents = MIXES[mix](total)
    return Configuration(mix, total, *heads, d, dtype, 0 if d == dv else dv, documents, device)


def problems(device: str, tiny_sizes: bool = False) -> list[tuple[Configuration, list[str]]]:
    """(problem, what is measured), most important first. tiny_sizes: for a run on a CPU that shows that all of it works."""
    totals = [256, 128] if tiny_sizes else TOTALS
    heads = (4, 2) if tiny_sizes else HEADS

    def each(dims: tuple[int, int], mixes: tuple[str, ...]) -> list[tuple[Configuration, list[str]]]:
        return [(problem(mix, total, dims, heads, device), PEERS.get(mix, OTHERS)) for total in totals for mix in mixes]

    # What the goals are set for (goals.py), then the other mixes, then the other head dims that models have.
    found = each(HEAD_DIMS[0], ("mixed", "one")) + each(HEAD_DIMS[0], ("tiny", "skew"))
    found += each(HEAD_DIMS[1], tuple(MIXES))
    # Equal numbers of heads: where torch takes cuDNN for varlen_attn, and where cuDNN serves that takes no groups.
    equal = (heads[0] // 4, heads[0] // 4)
    for total in totals[:2]:
        for mix, more in (("mixed", []), ("one", ["sdpa_cudnn"])):
            found.append((problem(mix, total, (128, 128), equal, device), ["packattn", "varlen", *more]))
    # FlexAttention compiles for tens of seconds.
    for total in totals[:2]:
        for mix in ("mixed", "one"):
            found.append((problem(mix, total, (128, 128), heads, device), ["packattn", "flex"]))
    for dims in HEAD_DIMS[2:]:
        found += each(dims, tuple(MIXES))
    return found
