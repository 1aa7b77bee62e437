"""Random boundaries, shapes, masks, dtypes and strides: attention against float64, the ops on ranges no packing makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Case
from helpers import (
    Oracle,
    assert_same_bits,
    cu_of_positions,
    inputs,
    inputs_of_document,
    mask,
    of_document,
    run,
    spans_of_ids,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packattn
from packattn import Packing

ops = torch.ops.packattn
fuzz = settings(
    deadline=None,
    max_examples=150,
    derandomize=True,  # the same examples everywhere; `pytest --hypothesis-seed=random` and derandomize=False look further
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
LAYOUTS = (
    "contiguous",
    "interleaved",
    "transposed",
    "sliced",
    "strided_dim",
    "swapped",
    "expanded_heads",
    "expanded_rows",
)
LENGTH = st.one_of(st.integers(0, 3), st.integers(0, 40), st.sampled_from((7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 130)))


@st.composite
def cases(draw: Any) -> Case:
    count = draw(st.integers(0, 6))
    q = draw(st.lists(LENGTH, min_size=count, max_size=count))
    kind = draw(st.sampled_from(("self", "self", "tail", "padding", "cross")))
    k = None
    if kind == "tail":
        q = [*q, -draw(st.integers(1, 20))]
    elif kind == "padding" and count:
        q = [max(n, 1) for n in q]
        at = draw(st.integers(0, count - 1))
        q[at:at] = [-draw(st.integers(1, 20))]
    elif kind == "cross":
        k = tuple(draw(st.lists(LENGTH, min_size=count, max_size=count)))
    documents = sum(n >= 0 for n in q)
    heads_k = draw(st.sampled_from((1, 2, 3)))
    dim = draw(st.sampled_from((8, 16, 24, 32, 40, 64, 72, 96, 128, 136)))
    causal = draw(st.booleans())
    side = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 150))
    prefix = None
    if draw(st.integers(0, 4)) == 0:
        prefix = tuple(draw(st.lists(st.integers(0, 50), min_size=documents, max_size=documents)))
    return Case(
        "fuzz",
        tuple(q),
        k=k,
        heads=(heads_k * draw(st.sampled_from((1, 1, 2, 4))), heads_k),
        dims=(dim, draw(st.sampled_from((dim, dim, 8, 48, 64)))),
        causal=causal,
        window=(draw(side), draw(side)) if draw(st.booleans()) else (-1, -1),
        chunk=draw(st.integers(1, 40)) if causal and draw(st.integers(0, 4)) == 0 else 0,
        prefix=prefix,
        scale=draw(st.sampled_from((None, None, 0.0, 0.5, -0.2, 1.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 1.0, 30.0))),
        sinks=draw(st.booleans()),
        magnitude=draw(st.sampled_from((1.0, 1.0, 8.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@fuzz
@given(cases(), st.sampled_from((FLOAT32, BFLOAT16, FLOAT16, FLOAT64)), st.integers(0, 1000), st.sampled_from(LAYOUTS))
def test_attention(case: Case, dtype: torch.dtype, seed: int, dout: str) -> None:
    x = inputs(case, dtype, seed=seed, dout=dout)
    Oracle(case, x).check(run(case, x))


@fuzz
@given(cases(), st.sampled_from((FLOAT32, BFLOAT16)), st.integers(0, 1000))
def test_packed_is_alone(native: None, case: Case, dtype: torch.dtype, seed: int) -> None:
    x = inputs(case, dtype, seed=seed)
    packed = run(case, x)
    for n in range(len(case.documents)):
        alone = run(case.alone(n), inputs_of_document(case, n, x))
        alone.pop("dsinks", None)
        assert_same_bits(of_document(case, n, packed), alone, f"document {n} alone and packed")


@fuzz
@given(cases(), st.sampled_from((math.nan, math.inf)), st.data())
def test_nan_stays_in_its_document(native: None, case: Case, value: float, data: Any) -> None:
    if not case.documents:
        return
    n = data.draw(st.integers(0, len(case.documents) - 1))
    x, d = inputs(case, FLOAT32), case.documents[n]
    clean = run(case, x)
    for name in ("q", "k", "v", "dout"):
        t = getattr(x, name).clone()
        start, length = (d.k_start, d.k_length) if name in "kv" else (d.q_start, d.q_length)
        t[start : start + length] = value
        setattr(x, name, t)
    dirty = run(case, x)
    for m in range(len(case.documents)):
        if m != n:
            assert_same_bits(of_document(case, m, dirty), of_document(case, m, clean), f"document {m}")


# ------------------------------------------------------------------------------------- ranges that no packing makes


@st.composite
def ranges(draw: Any, total_k: int) -> tuple[list[int], list[int]]:
    """key_begin, key_end of up to 80 rows: nondecreasing over the rows that see something, anything in the others."""
    rows = draw(st.integers(0, 80))
    inside = st.integers(0, total_k)
    begin = sorted(draw(st.lists(inside, min_size=rows, max_size=rows)))
    end = sorted(draw(st.lists(inside, min_size=rows, max_size=rows)))
    garbage = st.sampled_from(((0, 0), (5, 3), (-7, -9), (2**31 - 1, -(2**31)), (total_k + 9, total_k + 9)))
    for i in range(rows):
        if begin[i] >= end[i]:
            begin[i], end[i] = draw(garbage)
    return begin, end


def attention_over(x: dict[str, torch.Tensor], visible: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv in the dtype of x over a dense mask."""
    q, k, v = (x[n].detach().clone().requires_grad_() for n in "qkv")
    ratio = q.shape[1] // k.shape[1]
    some = visible.any(1)
    kk, vv = (t.repeat_interleave(ratio, dim=1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q[some], kk) * scale
    s = s.masked_fill(~visible[some], -math.inf)
    out = torch.zeros_like(x["dout"]).index_put((some,), torch.einsum("hqk,khd->qhd", s.softmax(-1), vv))
    lse = s.new_full((q.shape[0], q.shape[1]), -math.inf).index_put((some,), s.logsumexp(-1).t())
    grads = torch.autograd.grad(out, (q, k, v), x["dout"])
    return [out.detach(), lse.t().detach(), *grads]


@fuzz
@given(st.data())
def test_attention_over_any_ranges(data: Any) -> None:
    total_k = data.draw(st.integers(1, 150))
    begin, end = data.draw(ranges(total_k))
    dtype = data.draw(st.sampled_from((FLOAT32, BFLOAT16)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    shapes = {"q": (len(begin), 4, 32), "k": (total_k, 2, 32), "v": (total_k, 2, 40), "dout": (len(begin), 4, 40)}
    x = {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    key_begin, key_end = (torch.tensor(t, dtype=torch.int32) for t in (begin, end))
    q, k, v = (x[n].detach().requires_grad_() for n in "qkv")
    out, lse = ops.attention_forward(q, k, v, key_begin, key_end, None, 0.2, 0.0)
    got = [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), x["dout"])]

    j = torch.arange(total_k)
    visible = (j >= key_begin[:, None]) & (j < key_end[:, None])
    exact = attention_over({n: t.double() for n, t in x.items()}, visible, 0.2)
    plain = attention_over(x, visible, 0.2)
    plain[1] = attention_over({n: t.float() for n, t in x.items()}, visible, 0.2)[1]
    # The gradients are differences of products dout v, times q or k: the size of one such term.
    largest = {n: float(t.float().abs().amax()) if t.numel() else 0.0 for n, t in x.items()}
    size = 1 + 0.2 * 40**0.5 * largest["dout"] * largest["v"] * max(largest["q"], largest["k"])
    for name, g, e, p in zip(("out", "lse", "dq", "dk", "dv"), got, exact, plain, strict=True):
        assert torch.equal(torch.isneginf(g), torch.isneginf(e)), name
        g, e, p = (torch.where(torch.isneginf(t), 0, t.double()) for t in (g, e, p))
        if g.numel():
            floor = 4 * torch.finfo(FLOAT32).eps * size + torch.finfo(dtype).eps * float(e.abs().max())
            assert float((g - e).abs().max()) <= 2 * float((p - e).abs().max()) + floor, name
    assert not got[0][~visible.any(1)].any() and not got[2][~visible.any(1)].any()
    assert not got[3][~visible.any(0)].any() and not got[4][~visible.any(0)].any()


@fuzz
@given(st.data())
def test_no_ranges_reach_outside(data: Any) -> None:
    """Whatever the ranges hold, the op refuses them or serves them; it never reads past its buffers."""
    total_k = data.draw(st.integers(0, 40))
    rows = data.draw(st.integers(0, 30))
    value = st.one_of(st.integers(-5, 45), st.integers(-(2**31), 2**31 - 1))
    key_begin, key_end = (
        torch.tensor(data.draw(st.lists(value, min_size=rows, max_size=rows)), dtype=torch.int32) for _ in range(2)
    )
    q, k = torch.randn(rows, 2, 16), torch.randn(total_k, 1, 16)
    some = key_begin < key_end
    begin, end = key_begin[some], key_end[some]
    sound = bool(((begin >= 0) & (end <= total_k)).all() and (begin.diff() >= 0).all() and (end.diff() >= 0).all())
    try:
        out, lse = ops.attention_forward(q, k, k, key_begin, key_end, None, 1.0, 0.0)
    except (RuntimeError, ValueError) as error:
        assert not sound, error
        assert "key_begin" in str(error) or "key_end" in str(error)
    else:
        assert sound, "ranges that decrease or leave the keys were served"
        assert torch.equal(torch.isneginf(lse), ~some.expand(2, rows))
        assert not torch.isnan(out).any() and not out[~some].any()


# -------------------------------------------------------------------------------------------------- conversions


@fuzz
@given(
    st.lists(st.lists(st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4, 5, -1)), min_size=6, max_size=6), max_size=5),
    st.sampled_from(("step", "zero")),
    st.sampled_from((torch.int32, torch.int64)),
    st.booleans(),
)
def test_position_ids(rows: list[list[int]], rule: str, dtype: torch.dtype, room: bool) -> None:
    ids = torch.tensor(rows, dtype=dtype).reshape(len(rows), 6)
    expected = cu_of_positions(rows, rule)
    assert packattn.cu_seqlens_from_position_ids(ids, rule).tolist() == expected
    if room:
        wide = packattn.cu_seqlens_from_position_ids(ids, rule, max_segments=ids.numel() + 2).tolist()
        assert len(wide) == ids.numel() + 3
        assert wide == expected + [expected[-1]] * (len(wide) - len(expected))


@fuzz
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), max_size=5),
    st.sampled_from((None, 0)),
    st.sampled_from((torch.int32, torch.int64)),
)
def test_segment_ids(rows: list[list[int]], pad_id: int | None, dtype: torch.dtype) -> None:
    ids = torch.tensor(rows, dtype=dtype).reshape(len(rows), 7)
    p = Packing.from_segment_ids(ids, pad_id=pad_id)
    assert [(d.start, d.stop) for d in p.documents()] == spans_of_ids(rows, pad_id)
    assert bool((p.segment_ids[1:] >= 0).logical_or(p.segment_ids[1:] == -1).all())
    p.validate()


@fuzz
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 5), st.sampled_from((torch.int32, torch.int64)))
def test_lengths_round_trip(lengths: list[int], tail: int, dtype: torch.dtype) -> None:
    total = sum(lengths) + tail
    cu = packattn.cu_seqlens_from_lengths(torch.tensor(lengths, dtype=dtype))
    assert cu.diff().tolist() == lengths and int(cu[0]) == 0
    positions = packattn.position_ids_from_cu_seqlens(cu, total).tolist()
    assert positions == [i for n in (*lengths, tail) for i in range(n)]
    segments = packattn.segment_ids_from_cu_seqlens(cu, total).tolist()
    assert segments == [n for n, count in enumerate(lengths) for _ in range(count)] + [-1] * tail


@fuzz
@given(cases())
def test_masks(case: Case) -> None:
    begin, end = case.packing().key_ranges(case.packing_k(), **case.mask_options())
    j = torch.arange(case.total_k)
    assert torch.equal((j >= begin[:, None]) & (j < end[:, None]), mask(case))


@pytest.mark.slow
@settings(fuzz, max_examples=3000, derandomize=False)
@given(cases(), st.sampled_from((FLOAT32, BFLOAT16, FLOAT16, FLOAT64)), st.integers(0, 1000), st.sampled_from(LAYOUTS))
def test_attention_at_length(case: Case, dtype: torch.dtype, seed: int, dout: str) -> None:
    x = inputs(case, dtype, seed=seed, dout=dout)
    Oracle(case, x).check(run(case, x))
