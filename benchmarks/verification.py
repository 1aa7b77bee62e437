"""Is an implementation right? Compared with float64 before it is timed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from configurations import Configuration
from implementations import Implementation, Inputs

CHECKED_ROWS = 4096
"""A longer batch is compared on its first rows only, with a gradient of zero behind them, which keeps it exact."""

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest error allowed, as a fraction of the largest value. Correct implementations stay five times below it."""


@dataclass
class Expected:
    """float64 results over the first rows, for the first and the last key head and the query heads that read them."""

    rows: int
    heads_q: list[int]
    heads_kv: list[int]
    out: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    """The packed gradient to send back: zero past the checked rows."""


def expected(configuration: Configuration, inputs: Inputs) -> Expected:
    """Plain float64 attention and its gradients, document by document."""
    rows = min(CHECKED_ROWS, configuration.tokens)
    group = configuration.heads_q // configuration.heads_kv
    heads_kv = sorted({0, configuration.heads_kv - 1})
    heads_q = [h * group + g for h in heads_kv for g in range(group)]
    dout = inputs.dout.clone()
    dout[rows:] = 0

    out = torch.empty(rows, len(heads_q), configuration.head_dim, dtype=torch.float64)
    gradients = tuple(
        torch.zeros(rows, len(h), configuration.head_dim, dtype=torch.float64) for h in (heads_q, heads_kv, heads_kv)
    )
    begin = 0
    for length in configuration.lengths:
        end = min(begin + length, rows)
        if begin >= end:
            break
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        for i, head in enumerate(heads_q):  # head by head: the scores of one long document are 128 MiB
            j = i // group
            leaves = [
                x[begin:end, h].double().requires_grad_()
                for x, h in ((inputs.query, head), (inputs.key, heads_kv[j]), (inputs.value, heads_kv[j]))
            ]
            q, k, v = leaves
            result = (q @ k.T / math.sqrt(configuration.head_dim)).masked_fill(hidden, -math.inf).softmax(-1) @ v
            result.backward(dout[begin:end, head].double())
            out[begin:end, i] = result.detach()
            for total, leaf, h in zip(gradients, leaves, (i, j, j), strict=True):
                total[begin:end, h] += leaf.grad
        begin = end
    return Expected(rows, heads_q, heads_kv, out, gradients, dout)


def verify(implementation: Implementation, want: Expected, *, backward: bool) -> tuple[float, dict[str, float]]:
    """(error, seconds of the call for each direction).

    The error is the largest |got - want| / max|want| over the output and, if asked, the gradients; inf when anything is
    NaN. The seconds are those of a first call, good enough to decide how many samples there will be.
    """
    heads = (want.heads_q, want.heads_kv, want.heads_kv)
    start = time.perf_counter()
    out = implementation.forward()
    seconds = {"forward": time.perf_counter() - start}
    pairs = [(out, want.out, want.heads_q)]
    if backward:
        timed_dout, implementation.dout = implementation.dout, implementation.to_own(want.dout)
        start = time.perf_counter()
        implementation.forward_backward()
        seconds["forward_backward"] = time.perf_counter() - start
        implementation.dout = timed_dout
        pairs += [(leaf.grad, g, h) for leaf, g, h in zip(implementation.leaves, want.gradients, heads, strict=True)]
    worst = 0.0
    for got, right, chosen in pairs:
        error = (implementation.to_packed(got)[: want.rows, chosen].double() - right).abs().max() / right.abs().max()
        worst = max(worst, math.inf if error.isnan() else error.item())
    return worst, seconds
