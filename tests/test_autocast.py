"""torch.autocast on the CPU: the rule of scaled_dot_product_attention, forward and backward."""

from __future__ import annotations

import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, FLOAT64, id_of
from helpers import Inputs, inputs, same_bits

import packattn

CASE = BY_NAME["sinks_softcap_window"]


def leaves(x: Inputs) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, x.sinks)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packattn.attention(q, k, v, CASE.packing(), sinks=sinks, return_lse=True, **CASE.options())


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=id_of)
def test_float32_becomes_the_autocast_dtype(dtype: torch.dtype) -> None:
    x = inputs(CASE, FLOAT32)
    given, by_hand = leaves(x), leaves(x)
    with torch.autocast("cpu", dtype):
        out, lse = attend(*given)
    expected = attend(*(t.to(dtype) for t in by_hand[:3]), by_hand[3])
    assert out.dtype == dtype and lse.dtype == FLOAT32
    assert same_bits(out, expected[0]) and same_bits(lse, expected[1])
    grad = x.dout.to(dtype)
    torch.autograd.backward([out, lse], [grad, x.dlse])
    torch.autograd.backward(expected, [grad, x.dlse])
    for a, b in zip(given, by_hand, strict=True):
        assert a.grad.dtype == FLOAT32 and same_bits(a.grad, b.grad)
        assert bool(a.grad.any())


def test_mixed_dtypes_meet() -> None:
    """RoPE in float32 beside projections in bfloat16: an error without autocast, served under it."""
    x = inputs(CASE, FLOAT32)
    q, k, v = x.q, x.k, x.v.to(BFLOAT16)
    with pytest.raises((ValueError, RuntimeError), match="bfloat16"):
        attend(q, k, v, x.sinks)
    with torch.autocast("cpu", BFLOAT16):
        out, _ = attend(q, k, v, x.sinks)
    assert same_bits(out, attend(q.to(BFLOAT16), k.to(BFLOAT16), v, x.sinks)[0])


def test_integers_are_refused_as_without_autocast() -> None:
    """They must not become floats on the way: an index given for a query would pass."""
    q = torch.ones(9, 2, 16, dtype=torch.int64)
    for enabled in (False, True):
        with torch.autocast("cpu", BFLOAT16, enabled=enabled), pytest.raises((ValueError, RuntimeError), match="int64"):
            packattn.attention(q, q, q, packattn.Packing.from_lengths([4, 5]))


def test_same_rule_as_sdpa() -> None:
    """Where autocast leaves scaled_dot_product_attention alone it leaves attention alone."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype in (FLOAT32, BFLOAT16, FLOAT64):
        q = torch.randn(9, 2, 16, dtype=dtype)
        with torch.autocast("cpu", BFLOAT16):
            out = packattn.attention(q, q, q, packattn.Packing.from_lengths([4, 5]))
            assert out.dtype == sdpa(*(q.transpose(0, 1)[None],) * 3).dtype


def test_disabled_autocast_changes_nothing() -> None:
    x = inputs(CASE, FLOAT32)
    with torch.autocast("cpu", BFLOAT16, enabled=False):
        out, _ = attend(x.q, x.k, x.v, x.sinks)
    assert same_bits(out, attend(x.q, x.k, x.v, x.sinks)[0])


def test_a_module_trains_under_autocast() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 3 * 32)
    x = torch.randn(30, 32)
    packing = packattn.Packing.from_lengths([20, 9], total=30)
    with torch.autocast("cpu", BFLOAT16):
        q, k, v = linear(x).unflatten(-1, (3, 2, 16)).unbind(1)
        out = packattn.attention(q, k, v, packing)
        loss = out.float().square().sum()
    loss.backward()
    assert out.dtype == BFLOAT16 and linear.weight.grad.dtype == FLOAT32
    assert bool(torch.isfinite(linear.weight.grad).all()) and bool(linear.weight.grad.any())


def test_composite_op_under_autocast() -> None:
    q = torch.randn(9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autocast("cpu", BFLOAT16):
        out, lse = torch.ops.packattn.attention(q, q, q, cu)
    assert out.dtype == BFLOAT16 and lse.dtype == FLOAT32


def test_compiled_under_autocast() -> None:
    torch._dynamo.reset()
    packing = packattn.Packing.from_lengths([4, 5])
    q, k, v = (torch.randn(9, 2, 16, requires_grad=True) for _ in range(3))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BFLOAT16):
            return packattn.attention(q, k, v, packing)

    expected = torch.autograd.grad(function(q, k, v).sum(), (q, k, v))
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == BFLOAT16
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        assert a.dtype == FLOAT32 and same_bits(a, b)
