"""torch.autograd.gradcheck in float64 through the public function: q, k, v, sinks, by way of out and of lse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, FLOAT64, Case, id_of
from helpers import inputs
from torch.autograd import gradcheck

import packattn

# The table's masks on documents small enough for numerical gradients of every element.
SMALL = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": (1, -1)},
    "window_both": {"window": (1, 1), "causal": False},
    "window_0_0": {"window": (0, 0)},
    "chunk": {"chunk": 2},
    "prefix": {"prefix": (2, 0, 0, 5)},
    "softcap": {"softcap": 1.5, "magnitude": 2.0},
    "sinks": {"sinks": True},
    "sinks_softcap_window": {"sinks": True, "softcap": 1.5, "window": (2, -1)},
    "scale": {"scale": -0.7},
    "scale_0": {"scale": 0.0},
    "mqa": {"heads": (3, 1)},
    "cross_longer": {"k": (3, 1, 2, 5), "sinks": True},
    "cross_shorter": {"k": (1, 0, 1, 2), "sinks": True},
    "cross_bidirectional": {"k": (1, 2, 1, 4), "causal": False},
    "padding": {"q": (2, -1, 3, -2), "sinks": True},
    "only_empty": {"q": (0, -3), "sinks": True},
    "strided": {"layout": "sliced", "dims": (4, 2)},
}
CASES = [replace(Case(name, (3, 0, 1, 4), heads=(2, 1), dims=(4, 3)), **changes) for name, changes in SMALL.items()]


def check(case: Case, out: bool, lse: bool) -> None:
    x = inputs(case, FLOAT64)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    if x.sinks is not None:
        leaves.append(x.sinks.detach().requires_grad_())
    packing, options = case.packing(), case.options()

    def function(q, k, v, sinks=None):
        results = packattn.attention(q, k, v, packing, sinks=sinks, return_lse=True, **options)
        # -inf has no difference quotient: rows that see nothing stand as 0.
        finite = torch.where(torch.isneginf(results[1]), 0.0, results[1])
        return tuple(r for r, wanted in ((results[0], out), (finite, lse)) if wanted)

    # With every gradient wanted the check of undefined gradients is part of it.
    assert gradcheck(function, leaves, nondet_tol=0.0)


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_out_and_lse(case: Case) -> None:
    check(case, out=True, lse=True)


@pytest.mark.parametrize("name", ("causal", "sinks_softcap_window", "cross_shorter"))
def test_out_alone(name: str) -> None:
    check(next(c for c in CASES if c.name == name), out=True, lse=False)


@pytest.mark.parametrize("name", ("causal", "sinks_softcap_window", "cross_shorter"))
def test_lse_alone(name: str) -> None:
    check(next(c for c in CASES if c.name == name), out=False, lse=True)


def test_the_composite_op() -> None:
    cu = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    q, k, v = (torch.randn(6, h, 4, dtype=FLOAT64, requires_grad=True) for h in (2, 1, 1))
    assert gradcheck(lambda q, k, v: torch.ops.packattn.attention(q, k, v, cu)[0], (q, k, v), nondet_tol=0.0)


def test_gradcheck_can_fail() -> None:
    """A gradient that is 1% off is seen."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad

    case = BY_NAME["three_documents"]
    q = torch.randn(9, 2, 4, dtype=FLOAT64, requires_grad=True)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(lambda q: packattn.attention(Off.apply(q), q, q, case.packing()), (q,))
