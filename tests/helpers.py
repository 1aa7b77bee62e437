"""What is right, worked out without packattn: masks, attention in float64, the error law, inputs, bits.

The oracle is attention written out per document over the mask of that document, with its gradient by autograd in
float64. It takes the runs of a Case, never a packing or a key range, so an error in those shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from cases import Case

import packattn

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")


# ----------------------------------------------------------------------------------------------------- inputs


@dataclass
class Inputs:
    q: torch.Tensor  # [Tq, Hq, D]
    k: torch.Tensor  # [Tk, Hkv, D]
    v: torch.Tensor  # [Tk, Hkv, Dv]
    sinks: torch.Tensor | None  # [Hq] float32
    dout: torch.Tensor  # [Tq, Hq, Dv]
    dlse: torch.Tensor  # [Hq, Tq] float32

    def to(self, dtype: torch.dtype) -> Inputs:
        wide = accumulator(dtype)
        return Inputs(
            self.q.to(dtype),
            self.k.to(dtype),
            self.v.to(dtype),
            None if self.sinks is None else self.sinks.to(wide),
            self.dout.to(dtype),
            self.dlse.to(wide),
        )

    def clone(self) -> Inputs:
        """Own memory, the same strides where they can be kept."""
        return Inputs(*(None if t is None else relaid(t) for t in (getattr(self, f.name) for f in fields(self))))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def relaid(t: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) if 0 not in t.stride() else torch.empty_like(t)
    return copy.copy_(t)


def make(
    tokens: int, heads: int, dim: int, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Normal [tokens, heads, dim] in one of the memory layouts that callers have."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

    if layout == "contiguous":
        return normal(tokens, heads, dim)
    if layout == "interleaved":  # one of q, k, v of a fused projection [T, H, 3, D]
        return normal(tokens, heads, 3, dim)[:, :, 1]
    if layout == "transposed":  # [B, H, S, D] as transformers has it
        return normal(heads, tokens, dim).transpose(0, 1)
    if layout == "sliced":  # rows, heads and columns out of a larger tensor
        return normal(2 * tokens + 1, heads + 1, dim + 8)[1::2, 1:, 8:]
    if layout == "strided_dim":  # the last dimension is not contiguous: the op must copy
        return normal(tokens, heads, dim, 2)[..., 1]
    if layout == "expanded_heads":
        return normal(tokens, 1, dim).expand(tokens, heads, dim)
    if layout == "expanded_rows":
        return normal(1, heads, dim).expand(tokens, heads, dim)
    if layout == "swapped":  # head stride larger than row stride, rows not adjacent
        return normal(heads, tokens, 3, dim)[:, :, 2].transpose(0, 1)
    raise ValueError(layout)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0, dout: str = "sliced") -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    (hq, hkv), (d, dv) = case.heads, case.dims
    q = make(case.total_q, hq, d, case.layout, dtype, generator)
    if case.magnitude != 1.0:
        q = relaid(q).mul_(case.magnitude)
    return Inputs(
        q,
        make(case.total_k, hkv, d, case.layout, dtype, generator),
        make(case.total_k, hkv, dv, case.layout, dtype, generator),
        torch.randn(hq, generator=generator) if case.sinks else None,
        make(case.total_q, hq, dv, dout, dtype, generator),
        torch.randn(hq, case.total_q, generator=generator),
    ).to(dtype)


def run(case: Case, x: Inputs, function: Any = None, **changes: Any) -> dict[str, torch.Tensor]:
    """packattn.attention on the case, forward and backward, through autograd."""
    function = function or packattn.attention
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    sinks = None if x.sinks is None else x.sinks.detach().requires_grad_()
    options = case.options() | changes
    out, lse = function(q, k, v, case.packing(), sinks=sinks, return_lse=True, **options)
    wanted = [q, k, v] + ([] if sinks is None else [sinks])
    grads = torch.autograd.grad([out, lse], wanted, [x.dout, x.dlse.to(lse.dtype)])
    result = {"out": out.detach(), "lse": lse.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    if sinks is not None:
        result["dsinks"] = grads[3]
    return result


# --------------------------------------------------------------------------------------------------- the oracle


def sees(case: Case, rows: int, keys: int, prefix: int | None) -> torch.Tensor:
    """bool [rows, keys]: which keys of its document each row of a document sees. The mask rules, in words:

    Row i stands at key p = i + keys - rows: the last row at the last key. Causal: nothing past p. A window (left, right):
    nothing before p - left and, unless causal, past p + right. Chunks of C: nothing before the chunk of p. A
    prefix: its keys are visible whatever the causal rule says.
    """
    p = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)[None, :]
    left, right = case.window
    upper = torch.ones(rows, keys, dtype=torch.bool)
    if case.causal:
        upper &= j <= p
    elif right >= 0:
        upper &= j <= p + right
    if prefix is not None:
        upper |= j < prefix
    lower = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        lower &= j >= p - left
    if case.chunk > 0:
        lower &= j >= torch.div(p, case.chunk, rounding_mode="floor") * case.chunk
    return upper & lower


def mask(case: Case) -> torch.Tensor:
    """bool [Tq, Tk]"""
    result = torch.zeros(case.total_q, case.total_k, dtype=torch.bool)
    for d in case.documents:
        block = sees(case, d.q_length, d.k_length, d.prefix)
        result[d.q_start : d.q_start + d.q_length, d.k_start : d.k_start + d.k_length] = block
    return result


def groups(case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Documents of one shape together: rows [n, a], keys [n, b], mask [a, b], rows that see nothing left out."""
    shapes = defaultdict(list)
    for d in case.documents:
        shapes[d.q_length, d.k_length, d.prefix].append((d.q_start, d.k_start))
    result = []
    for (a, b, prefix), starts in shapes.items():
        visible = sees(case, a, b, prefix)
        some = visible.any(1)
        if not some.any():
            continue
        first = torch.tensor(starts)
        rows = (first[:, :1] + torch.arange(a))[:, some]
        result.append((rows, first[:, 1:] + torch.arange(b), visible[some]))
    return result


def scores(case: Case, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scale = 1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    s = torch.einsum("nahd,nbhd->nhab", q, k) * scale
    return case.softcap * torch.tanh(s / case.softcap) if case.softcap > 0 else s


def dense(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """Plain PyTorch attention in the dtype of its inputs, forward and backward. In float64 it is the oracle."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    sinks = None if x.sinks is None else x.sinks.detach().to(q.dtype).requires_grad_()
    ratio = case.heads[0] // case.heads[1]
    out = q.new_zeros(case.total_q, case.heads[0], case.dims[1])
    lse = q.new_full((case.total_q, case.heads[0]), -math.inf)
    for rows, keys, visible in groups(case):
        kk, vv = (t[keys].repeat_interleave(ratio, dim=2) for t in (k, v))
        s = scores(case, q[rows], kk).masked_fill(~visible, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
        p = torch.softmax(s, dim=-1)[..., : vv.shape[1]]
        out = out.index_put((rows,), torch.einsum("nhab,nbhd->nahd", p, vv))
        lse = lse.index_put((rows,), torch.logsumexp(s, dim=-1).transpose(1, 2))
    lse = lse.t()
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    result = {"out": out.detach(), "lse": lse.detach()}
    if out.requires_grad:
        grads = torch.autograd.grad(
            [out, lse], list(wanted.values()), [x.dout, x.dlse.to(q.dtype)], allow_unused=True, materialize_grads=True
        )
    else:  # no row sees anything
        grads = [torch.zeros_like(t) for t in wanted.values()]
    return result | {name: grad.detach() for name, grad in zip(wanted, grads, strict=True)}


def magnitudes(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """The oracle's sums with every term taken absolutely: what rounding errors are proportional to.

    out = P v; dv = P^T dout; dS = P (dout v^T - sum(dout out) + dlse); dq = scale dS k; dk = scale dS^T q. P is
    exp(S - lse), so a rounding of S (by its own sum of absolute terms) or of lse is a relative error of P.
    sum(dout out) is taken over the stored out: D roundings of half a unit in the last place, which add up as a norm does.
    """
    q, k, v, dout = (t.to(torch.float64).abs() for t in (x.q, x.k, x.v, x.dout))
    dlse = x.dlse.to(torch.float64).abs()
    ratio = case.heads[0] // case.heads[1]
    scale = 1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    stored = torch.finfo(x.q.dtype).eps / (4 * torch.finfo(accumulator(x.q.dtype)).eps)
    result = {name: torch.zeros_like(t) for name, t in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}
    result["lse"] = torch.zeros_like(dlse).t().contiguous()
    result["dsinks"] = torch.zeros(case.heads[0], dtype=torch.float64)
    for rows, keys, visible in groups(case):
        kk, vv = (t[keys].repeat_interleave(ratio, dim=2) for t in (k, v))
        s = scores(case, x.q[rows].double(), x.k[keys].double().repeat_interleave(ratio, dim=2))
        s = s.masked_fill(~visible, -math.inf)
        if x.sinks is not None:
            s = torch.cat([s, x.sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], dim=-1)
        p = torch.softmax(s, dim=-1)
        size = (
            (torch.einsum("nahd,nbhd->nhab", q[rows], kk) * abs(scale)).masked_fill(~visible, 0).amax(-1, keepdim=True)
        )
        size = size + torch.logsumexp(s, dim=-1, keepdim=True).abs()
        sink, p = p[..., vv.shape[1] :], p[..., : vv.shape[1]]
        out = torch.einsum("nhab,nbhd->nahd", p, vv)
        rounded = stored * (dout[rows] * out).norm(dim=-1).transpose(1, 2)[..., None]
        result["out"].index_put_((rows,), torch.einsum("nhab,nbhd->nahd", p * (1 + size), vv))
        result["lse"].index_put_((rows,), 1 + size.squeeze(-1).transpose(1, 2))
        delta = (dout[rows] * out).sum(-1).transpose(1, 2)[..., None] + dlse.t()[rows].transpose(1, 2)[..., None]
        ds = p * ((1 + size) * (torch.einsum("nahd,nbhd->nhab", dout[rows], vv) + delta) + rounded)
        result["dq"].index_put_((rows,), abs(scale) * torch.einsum("nhab,nbhd->nahd", ds, kk))
        shape = (*keys.shape, case.heads[1], ratio, -1)
        dk = abs(scale) * torch.einsum("nhab,nahd->nbhd", ds, q[rows])
        dv = torch.einsum("nhab,nahd->nbhd", p * (1 + size), dout[rows])
        result["dk"].index_put_((keys,), dk.reshape(shape).sum(3))
        result["dv"].index_put_((keys,), dv.reshape(shape).sum(3))
        if x.sinks is not None:
            result["dsinks"] += (sink * ((1 + size) * delta + rounded)).sum((0, 2, 3))
    result["lse"] = result["lse"].t()
    return result


def per_document(case: Case, name: str, value: torch.Tensor) -> torch.Tensor:
    """The largest of |value| in every document, [N]; for dsinks over the heads, [1]."""
    value = value.abs().double()
    if name == "dsinks":
        return value.amax(0, keepdim=True)
    rows = value.amax(0) if name == "lse" else value.flatten(1).amax(1)
    of_keys = name in ("dk", "dv")
    owner = torch.full((rows.numel(),), -1)
    for n, d in enumerate(case.documents):
        start, length = (d.k_start, d.k_length) if of_keys else (d.q_start, d.q_length)
        owner[start : start + length] = n
    inside = owner >= 0
    result = torch.zeros(len(case.documents), dtype=torch.float64)
    return result.scatter_reduce(0, owner[inside], rows[inside], "amax")


@dataclass
class Oracle:
    """What the results on given inputs may be. The law, for every document and result by itself:

    error against float64 <= 2 x error of plain PyTorch in the same precision + floor, where the floor is one rounding of
    the largest result, and the rounding of float32 accumulation by `magnitudes`.
    """

    case: Case
    x: Inputs
    exact: dict[str, torch.Tensor] = field(init=False)
    plain: dict[str, torch.Tensor] = field(init=False)
    size: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        dtype = self.x.q.dtype
        self.exact = dense(self.case, self.x.to(torch.float64))
        self.plain = dense(self.case, self.x)
        if dtype in (torch.bfloat16, torch.float16):  # lse is float32 whatever the inputs are
            self.plain["lse"] = dense(self.case, self.x.to(torch.float32))["lse"]
        self.size = magnitudes(self.case, self.x)

    def excess(self, name: str, got: torch.Tensor) -> torch.Tensor:
        """error / bound, one number per document: lawful up to 1. NaN where the result has one."""
        exact, plain = self.exact[name], self.plain[name].double()
        if name == "lse":
            same = torch.isneginf(exact) == torch.isneginf(got)
            got, exact, plain = (torch.where(torch.isneginf(t), 0, t.double()) for t in (got, exact, plain))
            got = torch.where(same, got, math.nan)
        error = per_document(self.case, name, got.double() - exact)
        wide = accumulator(self.x.q.dtype)
        own = wide if name in ("lse", "dsinks") else self.x.q.dtype
        bound = 2 * per_document(self.case, name, torch.nan_to_num(plain - exact, nan=0.0))
        bound += torch.finfo(own).eps * per_document(self.case, name, exact)
        bound += 2 * torch.finfo(wide).eps * per_document(self.case, name, self.size[name])
        return torch.where(error == 0, 0.0, error / bound)

    def check(self, got: dict[str, torch.Tensor], names: tuple[str, ...] = RESULTS) -> None:
        for name in names:
            if name not in self.exact:
                assert name not in got
                continue
            expected = self.exact[name]
            assert got[name].shape == expected.shape, (name, got[name].shape)
            excess = self.excess(name, got[name])
            if not bool((excess <= 1).all()):
                n = int(torch.nan_to_num(excess, nan=math.inf).argmax())
                raise AssertionError(
                    f"{self.case.name}: {name} of document {n} has {excess[n]:.3g} times the error that the law allows"
                )
            # Rows that no document covers, and rows that see nothing: exactly nothing.
            nothing = -math.inf if name == "lse" else 0.0
            if name == "lse":
                outside = torch.isneginf(expected)
            elif name in ("out", "dq"):
                outside = torch.isneginf(self.exact["lse"]).t()
            elif name in ("dk", "dv"):
                outside = ~mask(self.case).any(0) if self.case.total_k <= 8192 else None
            else:
                outside = None
            if outside is not None:
                assert bool((got[name][outside] == nothing).all()), f"{self.case.name}: {name} where nothing is seen"


# ---------------------------------------------------------------------------------------------------------- bits


def bits(t: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.detach().contiguous().view(kind)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, NaN and the sign of zero too."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def assert_same_bits(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str, but: tuple[str, ...] = ()
) -> None:
    assert a.keys() == b.keys()
    wrong = [name for name in a if name not in but and not same_bits(a[name], b[name])]
    assert not wrong, f"{what}: {', '.join(wrong)} differ"


def of_document(case: Case, n: int, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of out, lse, dq, dk, dv that belongs to document n."""
    d = case.documents[n]
    rows, keys = slice(d.q_start, d.q_start + d.q_length), slice(d.k_start, d.k_start + d.k_length)
    part = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    return {"lse": results["lse"][:, rows]} | {name: results[name][index] for name, index in part.items()}


def inputs_of_document(case: Case, n: int, x: Inputs) -> Inputs:
    d = case.documents[n]
    rows, keys = slice(d.q_start, d.q_start + d.q_length), slice(d.k_start, d.k_start + d.k_length)
    return replace(x, q=x.q[rows], k=x.k[keys], v=x.v[keys], dout=x.dout[rows], dlse=x.dlse[:, rows])


# ---------------------------------------------------------------------------------------------------- boundaries


def cu_of_positions(rows: list[list[int]], rule: str) -> list[int]:
    """cu_seqlens of position ids, one token at a time."""
    cu, at = [0], 0
    for row in rows:
        for t, p in enumerate(row):
            new = t == 0 or (p == 0 if rule == "zero" else p != row[t - 1] + 1)
            if new and at > 0:
                cu.append(at)
            at += 1
    return cu + [at] if at > 0 else cu


def spans_of_ids(rows: list[list[int]], pad_id: int | None) -> list[tuple[int, int]]:
    """(first row, one past the last) of every document of segment ids, one token at a time."""
    result, at, open_at = [], 0, None
    for row in rows:
        for t, i in enumerate(row):
            if open_at is not None and (t == 0 or i != row[t - 1]):
                result.append((open_at, at))
                open_at = None
            if open_at is None and i != pad_id:
                open_at = at
            at += 1
    return result + ([(open_at, at)] if open_at is not None else [])
