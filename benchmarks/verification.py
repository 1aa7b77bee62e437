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

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
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


def expected(configuration: Configuration, inputs: Inputs, checked_rows: int = CHECKED_ROWS) -> Expected:
    """Plain float64 attention and its gradients, document by document, where the inputs are."""
    rows = min(checked_rows, configuration.tokens)
    group = configuration.heads_q // configuration.heads_kv
    heads_kv = sorted({0, configuration.heads_kv - 1})
    heads_q = [h * group + g for h in heads_kv for g in range(group)]
    dout = inputs.dout.clone()
    dout[rows:] = 0

    def zeros(heads: list[int], dim: int) -> Tensor:
        return torch.zeros(rows, len(heads), dim, dtype=torch.float64, device=configuration.device)

    d, dv = configuration.head_dim, configuration.dim_v
    out, gradients = zeros(heads_q, dv), (zeros(heads_q, d), zeros(heads_kv, d), zeros(heads_kv, dv))
    # On the CPU head by head: the scores of one long document are 128 MiB. A GPU has the room, and no time for many calls.
    portions = [[i] for i in range(len(heads_q))] if configuration.device == "cpu" else [list(range(len(heads_q)))]
    begin = 0
    for length in configuration.lengths:
        end = min(begin + length, rows)
        if begin >= end:
            break
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=configuration.device).triu(1)
        for queries in portions:
            keys = [i // group for i in queries]
            chosen = [heads_q[i] for i in queries], [heads_kv[j] for j in keys], [heads_kv[j] for j in keys]
            leaves = [
                x[begin:end, heads].double().transpose(0, 1).requires_grad_()  # [heads, rows, dim]
                for x, heads in zip((inputs.query, inputs.key, inputs.value), chosen, strict=True)
            ]
            q, k, v = leaves
            result = (q @ k.mT / math.sqrt(d)).masked_fill(hidden, -math.inf).softmax(-1) @ v
            result.backward(dout[begin:end, chosen[0]].double().transpose(0, 1))
            out[begin:end, queries] = result.detach().transpose(0, 1)
            for total, leaf, heads in zip(gradients, leaves, (queries, keys, keys), strict=True):
                index = torch.tensor(heads, device=configuration.device)
                total[begin:end].index_add_(1, index, leaf.grad.transpose(0, 1))
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
