"""packattn.attention against float64: every case of the table, every kernel dtype, forward and backward."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from cases import BFLOAT16, BY_NAME, CASES, FLOAT16, FLOAT32, FLOAT64, KERNEL_DTYPES, SUBSET, Case, id_of
from helpers import Inputs, Oracle, assert_same_bits, inputs, make, relaid, run, same_bits

import packattn

TABLE = [
    pytest.param(case, dtype, marks=[pytest.mark.slow] if case.slow else [], id=f"{case.name}-{id_of(dtype)}")
    for case in CASES
    for dtype in case.dtypes
]


@pytest.mark.parametrize(("case", "dtype"), TABLE)
def test_against_float64(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    before = x.clone()
    got = run(case, x)
    assert got["out"].dtype == dtype and got["lse"].dtype == FLOAT32
    assert got["out"].is_contiguous() and got["lse"].is_contiguous()
    Oracle(case, x).check(got)
    for name in ("q", "k", "v", "dout", "dlse"):
        assert same_bits(getattr(x, name), getattr(before, name)), f"{name} was written to"


@pytest.mark.parametrize("case", [c for c in SUBSET if c.total_q < 300], ids=id_of)
def test_float64_is_served(case: Case) -> None:
    x = inputs(case, FLOAT64)
    got = run(case, x)
    assert got["out"].dtype == FLOAT64 and got["lse"].dtype == FLOAT64
    Oracle(case, x).check(got)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=id_of)
def test_other_numbers(dtype: torch.dtype, seed: int) -> None:
    case = BY_NAME["sinks_softcap_window"]
    x = inputs(case, dtype, seed=seed)
    Oracle(case, x).check(run(case, x))


# ------------------------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
@pytest.mark.parametrize(
    "layout", ("interleaved", "transposed", "sliced", "strided_dim", "swapped", "expanded_heads", "expanded_rows")
)
def test_strides_of_inputs_change_no_bit(layout: str, dtype: torch.dtype, native: None) -> None:
    case = replace(BY_NAME["layout_contiguous"], layout=layout, sinks=True)
    x = inputs(case, dtype)
    flat = replace(x, q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous(), dout=x.dout.contiguous())
    assert not x.q.is_contiguous()
    assert_same_bits(run(case, x), run(case, flat), layout)


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
@pytest.mark.parametrize(
    "layout", ("interleaved", "transposed", "sliced", "strided_dim", "expanded_rows", "expanded_heads")
)
@pytest.mark.parametrize("name", ("layout_contiguous", "reported_tail_of_two_rows", "short_documents"))
def test_strides_of_dout_change_no_bit(name: str, layout: str, dtype: torch.dtype, native: None) -> None:
    case = BY_NAME[name]
    x = inputs(case, dtype, dout=layout)
    assert not x.dout.is_contiguous()
    Oracle(case, x).check(run(case, x))
    assert_same_bits(run(case, x), run(case, replace(x, dout=x.dout.contiguous())), layout)


@pytest.mark.parametrize("dtype", (*KERNEL_DTYPES, FLOAT64), ids=id_of)
@pytest.mark.parametrize("name", ("three_documents", "skew", "reported_zero_length_documents", "dim_12_falls_back"))
def test_gradient_of_a_sum(name: str, dtype: torch.dtype) -> None:
    """out.sum().backward() hands the op a gradient of stride 0 in every dimension."""
    case = BY_NAME[name]
    x = inputs(case, dtype)
    x.dout, x.dlse = torch.ones_like(x.dout), torch.zeros_like(x.dlse)
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    packattn.attention(q, k, v, case.packing(), **case.options()).sum().backward()
    Oracle(case, x).check({"dq": q.grad, "dk": k.grad, "dv": v.grad}, ("dq", "dk", "dv"))


# ----------------------------------------------------------------------------------------- parts of the gradient


def results_wanted(case: Case, x: Inputs, wanted: str, out: bool, lse: bool) -> dict[str, torch.Tensor]:
    """Gradients of the inputs named in `wanted`, out of the results chosen."""
    tensors = {"q": x.q, "k": x.k, "v": x.v, "s": x.sinks}
    leaf = {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items() if t is not None}
    results = packattn.attention(
        leaf["q"], leaf["k"], leaf["v"], case.packing(), sinks=leaf.get("s"), return_lse=True, **case.options()
    )
    given = [(results[0], x.dout)] * out + [(results[1], x.dlse)] * lse
    grads = torch.autograd.grad([r for r, _ in given], [leaf[n] for n in wanted], [g for _, g in given])
    return {{"q": "dq", "k": "dk", "v": "dv", "s": "dsinks"}[n]: g for n, g in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize("wanted", ("q", "k", "v", "s", "qk", "kv", "vs"))
def test_gradient_of_some_inputs(wanted: str) -> None:
    case = BY_NAME["sinks_softcap_window"]
    x = inputs(case, FLOAT32)
    whole = run(case, x)
    part = results_wanted(case, x, wanted, out=True, lse=True)
    assert_same_bits(part, {name: whole[name] for name in part}, wanted)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=id_of)
@pytest.mark.parametrize("name", ("skew", "sinks_softcap_window", "cross_k_shorter"))
def test_gradient_through_out_only_and_through_lse_only(name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    x = inputs(case, dtype)
    wanted = "qkv" + "s" * case.sinks
    for out, lse in ((True, False), (False, True)):
        y = replace(x, dout=x.dout * out, dlse=x.dlse * lse)
        if lse:  # autograd then has no gradient of out at all; v gets zero
            got = results_wanted(case, x, wanted, out=False, lse=True)
            assert not got["dv"].any()
        else:
            got = results_wanted(case, x, wanted, out=True, lse=False)
        Oracle(case, y).check(got, tuple(got))


def test_lse_is_not_dropped() -> None:
    case = BY_NAME["three_documents"]
    x = inputs(case, FLOAT32)
    with_lse = run(case, x)
    without = run(case, replace(x, dlse=torch.zeros_like(x.dlse)))
    assert not torch.allclose(with_lse["dq"], without["dq"], atol=1e-3)


def test_return_lse() -> None:
    case = BY_NAME["three_documents"]
    x = inputs(case, FLOAT32)
    out = packattn.attention(x.q, x.k, x.v, case.packing())
    assert isinstance(out, torch.Tensor)
    both = packattn.attention(x.q, x.k, x.v, case.packing(), return_lse=True)
    assert same_bits(out, both[0]) and both[1].shape == (case.heads[0], case.total_q)


@pytest.mark.parametrize("sink_dtype", (FLOAT32, BFLOAT16, FLOAT16, FLOAT64), ids=id_of)
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
def test_sinks_of_any_float_dtype(dtype: torch.dtype, sink_dtype: torch.dtype) -> None:
    case = BY_NAME["sinks"]
    x = inputs(case, dtype)
    x.sinks = x.sinks.to(BFLOAT16).to(sink_dtype)  # values that every dtype holds
    got = run(case, x)
    assert got["dsinks"].dtype == sink_dtype
    wide = run(case, replace(x, sinks=x.sinks.float()))
    assert_same_bits(got, wide, "sinks", but=("dsinks",))
    assert torch.equal(got["dsinks"], wide["dsinks"].to(sink_dtype))


@pytest.mark.parametrize("tokens", (8, 40))
def test_infinite_sinks(tokens: int) -> None:
    """A sink of +inf takes all the weight, one of -inf takes none, whatever path a document's length leads to."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, tokens, 2, 16))
    packing = packattn.Packing.from_lengths([tokens])
    sinks = torch.tensor([math.inf, -math.inf])
    out, lse = packattn.attention(q, k, v, packing, sinks=sinks, return_lse=True)
    expected = packattn.attention(q, k, v, packing)
    assert not out[:, 0].any() and torch.isposinf(lse[0]).all()
    torch.testing.assert_close(out[:, 1], expected[:, 1])
    for gradient in torch.autograd.grad(out, (q, k, v), v.detach()):
        assert not gradient[:, 0].any() and gradient[:, 1].isfinite().all()


# --------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=id_of)
@pytest.mark.parametrize("causal", (True, False))
def test_window_0_0_sees_itself(causal: bool, dtype: torch.dtype) -> None:
    case = BY_NAME["reported_window_0_0" + "_bidirectional" * (not causal)]
    x = inputs(case, dtype)
    got = run(case, x)
    assert torch.equal(got["out"], x.v)
    torch.testing.assert_close(got["dv"], x.dout)


def test_scale_0_is_the_mean() -> None:
    """scale=0.0 is a scale, not a missing one."""
    q, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = packattn.attention(q, q, v, packattn.Packing.from_lengths([5]), scale=0.0, causal=False)
    torch.testing.assert_close(out, v.mean(0).expand(5, 2, 8))


def test_default_scale_is_of_the_head_dim_of_q() -> None:
    case = BY_NAME["dim_192_128"]
    x = inputs(case, FLOAT32)
    assert_same_bits(run(case, x), run(case, x, scale=1 / math.sqrt(192)), "scale")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
def test_reported_12000_documents_of_one_token(dtype: torch.dtype) -> None:
    """T * H * D * 44 and the like pass 2^31 here; every row sees itself alone, so the result is known."""
    tokens, heads, dim = 12_000, 32, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (make(tokens, heads, dim, "contiguous", dtype, generator).requires_grad_() for _ in range(3))
    out, lse = packattn.attention(q, k, v, packattn.Packing.from_lengths([1] * tokens), return_lse=True)
    assert torch.equal(out, v)
    score = (q.detach().float() * k.detach().float()).sum(-1) / math.sqrt(dim)
    torch.testing.assert_close(lse, score.t(), atol=1e-5, rtol=1e-5)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(dout)
    torch.testing.assert_close(v.grad, dout)
    # dS = P (dP - delta) is a difference of two equal sums of D terms: rounding is what is left.
    rest = 4 * torch.finfo(FLOAT32).eps * float((dout.float() * v.detach().float()).abs().sum(-1).max())
    for grad, other in ((q.grad, k), (k.grad, q)):
        assert float(grad.abs().max()) <= rest * float(other.detach().abs().max())


@pytest.mark.slow
def test_reported_cost_of_8192_documents(native: None) -> None:
    """A token costs the same among 8192 documents as among 128: nothing is launched per document, nothing is quadratic."""

    def seconds_per_token(documents: int) -> float:
        case = Case("", (34,) * documents, heads=(4, 4), dims=(64, 64), layout="contiguous")
        x = inputs(case, FLOAT32)
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            run(case, x)
            best = min(best, time.perf_counter() - start)
        return best / case.total_q

    assert seconds_per_token(8192) <= 2 * seconds_per_token(128)


# ------------------------------------------------------------------------------------------------------ refusals


def call(**changes: object) -> None:
    """packattn.attention on sound arguments but for the changes."""
    arguments = {
        "q": torch.zeros(6, 4, 16),
        "k": torch.zeros(6, 2, 16),
        "v": torch.zeros(6, 2, 16),
        "packing": packattn.Packing.from_lengths([4, 2]),
    } | changes
    packattn.attention(**arguments)


META = torch.device("meta")
REFUSALS = {
    "q_2d": ({"q": torch.zeros(6, 64)}, r"\bq|query"),
    "k_4d": ({"k": torch.zeros(1, 6, 2, 16)}, r"\bk\b|key"),
    "v_2d": ({"v": torch.zeros(6, 32)}, r"\bv\b|value"),
    "q_no_tensor": ({"q": [1.0]}, r"q must be 3-D .* got list"),
    "k_missing": ({"k": None}, r"k must be 3-D .* got NoneType"),
    "v_missing": ({"v": None}, r"v must be 3-D .* got NoneType"),
    "causal_missing": ({"causal": None}, r"causal must be True or False"),
    "head_dim_of_k": ({"k": torch.zeros(6, 2, 8)}, r"8"),
    "heads_of_v": ({"v": torch.zeros(6, 4, 16)}, r"\bv\b|value"),
    "heads_do_not_divide": ({"q": torch.zeros(6, 5, 16)}, r"5.*2|multiple"),
    "no_heads": ({"k": torch.zeros(6, 0, 16), "v": torch.zeros(6, 0, 16)}, r"head"),
    "tokens_of_q": ({"q": torch.zeros(7, 4, 16)}, r"7"),
    "tokens_of_k": ({"k": torch.zeros(5, 2, 16), "v": torch.zeros(5, 2, 16)}, r"5"),
    "tokens_of_v": ({"v": torch.zeros(5, 2, 16)}, r"\bv\b|value"),
    "dtype_of_k": ({"k": torch.zeros(6, 2, 16, dtype=BFLOAT16)}, r"bfloat16"),
    "dtype_of_v": ({"v": torch.zeros(6, 2, 16, dtype=FLOAT64)}, r"float64"),
    "integers": ({n: torch.zeros(6, 2, 16, dtype=torch.int64) for n in "qkv"}, r"int64"),
    "device_of_k": ({"k": torch.zeros(6, 2, 16, device=META)}, r"meta"),
    "device_of_packing": ({"packing": packattn.Packing.from_lengths([4, 2]).to("meta")}, r"meta"),
    "no_packing": ({"packing": torch.tensor([0, 4, 6])}, r"[Pp]acking"),
    "documents_of_packing_k": ({"packing_k": packattn.Packing.from_lengths([6])}, r"documents"),
    "tokens_of_packing_k": ({"packing_k": packattn.Packing.from_lengths([4, 3])}, r"7"),
    "window_of_three": ({"window_size": (1, 2, 3)}, r"window_size"),
    "window_no_pair": ({"window_size": 4}, r"window_size"),
    "window_below_minus_one": ({"window_size": (-2, 0)}, r"window"),
    "window_float": ({"window_size": (1.5, 0)}, r"window"),
    "window_none": ({"window_size": (None, 0)}, r"window_size"),
    "chunk_negative": ({"chunk_size": -1}, r"chunk_size"),
    "prefix_of_other_count": ({"prefix_lengths": torch.tensor([1, 2, 3])}, r"prefix_lengths"),
    "prefix_float": ({"prefix_lengths": torch.tensor([1.0, 2.0])}, r"prefix_lengths"),
    "prefix_negative": ({"prefix_lengths": torch.tensor([1, -2])}, r"prefix_lengths\[1\] = -2"),
    "prefix_device": ({"prefix_lengths": torch.tensor([1, 2], device=META)}, r"prefix_lengths must be on cpu"),
    "softcap_negative": ({"softcap": -1.0}, r"softcap"),
    "softcap_nan": ({"softcap": math.nan}, r"softcap"),
    "softcap_none": ({"softcap": None}, r"softcap must be a number"),
    "scale_nan": ({"scale": math.nan}, r"scale"),
    "scale_text": ({"scale": "0.5"}, r"scale must be a number"),
    "scale_per_head": ({"scale": torch.ones(4)}, r"scale must be a number"),
    "scale_learned": ({"scale": torch.tensor(0.5, requires_grad=True)}, r"scale .* no gradient"),
    "sparse": ({"k": torch.zeros(6, 2, 16).to_sparse()}, r"k must be a dense tensor"),
    "head_dim_0": ({n: torch.zeros(6, 2, 0) for n in "qkv"}, r"one element"),
    "scale_infinite": ({"scale": math.inf}, r"scale"),
    "sinks_of_other_count": ({"sinks": torch.zeros(2)}, r"sinks"),
    "sinks_2d": ({"sinks": torch.zeros(4, 1)}, r"sinks"),
    "sinks_integers": ({"sinks": torch.zeros(4, dtype=torch.int64)}, r"sinks"),
    "sinks_device": ({"sinks": torch.zeros(4, device=META)}, r"sinks"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, words = REFUSALS[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words) as caught:
        call(**changes)
    assert not isinstance(caught.value, NotImplementedError)


def test_the_sound_call_is_sound() -> None:
    call()
    call(sinks=torch.zeros(4), window_size=(2, 0), prefix_lengths=torch.tensor([1, 0]), softcap=1.0, chunk_size=3)
    call(window_size=[2, 0], prefix_lengths=torch.tensor([1, 0], dtype=torch.int64))


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="dropout"):
        call(dropout=0.1)


def test_double_backward_says_so() -> None:
    case = BY_NAME["three_documents"]
    for dtype in (FLOAT32, FLOAT64):
        x = inputs(case, dtype)
        q = x.q.detach().requires_grad_()
        out = packattn.attention(q, x.k, x.v, case.packing())
        with pytest.raises(RuntimeError, match="packattn|differentiat"):
            (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            grad.square().sum().backward()


@pytest.mark.parametrize("name", ("q", "k", "v", "sinks"))
def test_forward_mode_says_so(name: str) -> None:
    """torch.func.jvp would give a derivative of 0, without a word."""
    x = inputs(BY_NAME["sinks"], FLOAT32)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "sinks": x.sinks}

    def function(t: torch.Tensor) -> torch.Tensor:
        return packattn.attention(packing=BY_NAME["sinks"].packing(), **(tensors | {name: t}))

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(function, (tensors[name],), (torch.ones_like(tensors[name]),))


def test_no_grad_and_inference_mode() -> None:
    case = BY_NAME["three_documents"]
    x = inputs(case, FLOAT32)
    q = x.q.detach().requires_grad_()
    expected = packattn.attention(q, x.k, x.v, case.packing())
    with torch.no_grad():
        out = packattn.attention(q, x.k, x.v, case.packing())
        assert not out.requires_grad and same_bits(out, expected)
    with torch.inference_mode():
        assert same_bits(packattn.attention(q.clone(), x.k, x.v, case.packing()), expected)


def test_relaid_keeps_strides() -> None:
    """The helper that copies inputs must not quietly make them contiguous."""
    t = torch.randn(3, 4, 6)[:, 1:, ::2]
    assert relaid(t).stride() == torch.empty_strided(t.size(), t.stride()).stride() and torch.equal(relaid(t), t)


def test_functorch_gradients_say_so() -> None:
    """torch's own message asks the user to override a method of a class that is not theirs."""
    case = BY_NAME["three_documents"]
    x = inputs(case, FLOAT32)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return packattn.attention(q, x.k, x.v, case.packing()).sum()

    for transform in (
        torch.func.grad,
        torch.func.jacrev,
        lambda f: torch.func.grad(lambda q: torch.vmap(f)(q[None])[0]),
    ):
        with pytest.raises(NotImplementedError, match="torch.func.grad"):
            transform(loss)(x.q.detach())
