"""What the host ops do to their inputs before a kernel sees them: copies, conversions, empty tensors, errors in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

OPS = torch.ops.packattn
TOTAL_Q, TOTAL_K, HEADS_Q, HEADS_K, DIM, DIM_V = 37, 41, 4, 2, 16, 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    key_end = torch.arange(3, TOTAL_Q + 3, dtype=torch.int32)
    key_end[5] = 0  # a row of no key
    return {
        "query": normal(TOTAL_Q, HEADS_Q, DIM),
        "key": normal(TOTAL_K, HEADS_K, DIM),
        "value": normal(TOTAL_K, HEADS_K, DIM_V),
        "key_begin": torch.tensor([0] * 10 + [10] * 20 + [30] * 7, dtype=torch.int32),
        "key_end": key_end,
        "sinks": normal(HEADS_Q).float(),
        "scale": 0.3,
        "softcap": 5.0,
    }


def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "dout": torch.randn(TOTAL_Q, HEADS_Q, DIM_V, generator=generator).to(dtype),
        "dlse": torch.randn(HEADS_Q, TOTAL_Q, generator=generator),
    }


def spread(x: Any) -> Any:
    """The same values with a stride of 2 in the last dimension, and something else in between."""
    if not isinstance(x, Tensor):
        return x
    wide = torch.full((*x.shape, 2), 77 if x.dtype == torch.int32 else float("nan"), dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_input_has_to_be_contiguous(dtype: torch.dtype) -> None:
    x, g = inputs(dtype), gradients(dtype)
    out, lse = OPS.attention_forward(**x)
    assert_same(OPS.attention_forward(**{n: spread(t) for n, t in x.items()}), (out, lse))
    expected = OPS.attention_backward(**x, **g, out=out, lse=lse)
    everything = x | g | {"out": out, "lse": lse}
    assert_same(OPS.attention_backward(**{n: spread(t) for n, t in everything.items()}), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_gradients(dtype: torch.dtype) -> None:
    x = inputs(dtype)
    out, lse = OPS.attention_forward(**x)
    dout, dlse = torch.ones((), dtype=dtype).expand(out.shape), torch.ones(()).expand(lse.shape)
    expected = OPS.attention_backward(**x, dout=dout.contiguous(), dlse=dlse.contiguous(), out=out, lse=lse)
    assert_same(OPS.attention_backward(**x, dout=dout, dlse=dlse, out=out, lse=lse), expected)


@pytest.mark.parametrize("head_dim", (DIM, 5), ids=("compiled", "reference"))
@pytest.mark.parametrize("sink_dtype", (None, *DTYPES, torch.float64), ids=str)
def test_dsinks_has_the_dtype_of_sinks(sink_dtype: torch.dtype | None, head_dim: int) -> None:
    x, g = inputs(torch.float32), gradients(torch.float32)
    x["query"], x["key"] = x["query"][..., :head_dim], x["key"][..., :head_dim]
    x["sinks"] = None if sink_dtype is None else x["sinks"].to(sink_dtype)
    out, lse = OPS.attention_forward(**x)
    *_, dsinks = OPS.attention_backward(**x, **g, out=out, lse=lse)
    assert dsinks.dtype == (sink_dtype or torch.float32)
    assert dsinks.shape == ((0,) if sink_dtype is None else (HEADS_Q,))


@pytest.mark.parametrize(("total_q", "total_k"), ((0, 5), (5, 0), (0, 0)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(dtype: torch.dtype, total_q: int, total_k: int) -> None:
    x = inputs(dtype)
    x["query"], x["key"], x["value"] = x["query"][:total_q], x["key"][:total_k], x["value"][:total_k]
    x["key_begin"] = x["key_end"] = torch.zeros(total_q, dtype=torch.int32)
    out, lse = OPS.attention_forward(**x)
    assert out.shape == (total_q, HEADS_Q, DIM_V) and not out.any() and torch.isneginf(lse).all()
    grads = OPS.attention_backward(**x, dout=torch.ones_like(out), dlse=torch.ones_like(lse), out=out, lse=lse)
    assert [t.shape for t in grads[:3]] == [x["query"].shape, x["key"].shape, x["value"].shape]
    assert not any(t.any() for t in grads)


def test_errors_and_results_in_several_threads() -> None:
    x = inputs(torch.float32)
    expected = OPS.attention_forward(**x)
    wrong = x | {"key_begin": x["key_begin"] - 1}

    def work(_: int) -> None:
        for _ in range(20):
            assert_same(OPS.attention_forward(**x), expected)
            with pytest.raises((RuntimeError, ValueError), match="key_begin"):
                OPS.attention_forward(**wrong)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(4)))) == 4
