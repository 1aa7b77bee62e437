"""The torch ops: one place for every schema, fake, autograd formula and autocast rule of ``torch.ops.packattn``.

The compiled library (csrc/ops) only adds kernels to these schemas. Where it has none (another device, a build without
it), the dispatcher takes :mod:`packattn.reference`; where it has one that does not serve the inputs (float64, an odd
head dim), that kernel calls ``attention_*_reference`` itself. Either way the ops exist with the same schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _library, checks, reference

_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor key_begin, Tensor key_end, Tensor? sinks, float scale, "
    "float softcap) -> (Tensor out, Tensor lse)"
)
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor key_begin, "
    "Tensor key_end, Tensor? sinks, float scale, float softcap) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsinks)"
)

SCHEMAS = {
    "cu_seqlens_from_lengths": "(Tensor lengths) -> Tensor",
    "cu_seqlens_from_segment_ids": "(Tensor segment_ids, int? pad_id=None, SymInt? max_segments=None) -> Tensor",
    "cu_seqlens_from_position_ids": '(Tensor position_ids, str rule="step", SymInt? max_segments=None) -> Tensor',
    "documents_from_segment_ids": (
        "(Tensor segment_ids, int? pad_id=None, SymInt? max_segments=None) -> (Tensor starts, Tensor ends)"
    ),
    "position_ids_from_cu_seqlens": "(Tensor cu_seqlens, SymInt total) -> Tensor",
    "segment_ids_from_cu_seqlens": "(Tensor cu_seqlens, SymInt total) -> Tensor",
    "document_ranges": (
        "(Tensor starts_q, Tensor ends_q, Tensor starts_k, Tensor ends_k, SymInt total_q) "
        "-> (Tensor begin, Tensor end, Tensor diagonal, Tensor segment_ids)"
    ),
    "key_ranges": (
        "(Tensor begin, Tensor end, Tensor? diagonal, Tensor? prefix_end, bool causal, SymInt window_left, "
        "SymInt window_right, SymInt chunk_size) -> (Tensor key_begin, Tensor key_end)"
    ),
    "query_ranges": "(Tensor key_begin, Tensor key_end, SymInt total_k) -> (Tensor query_begin, Tensor query_end)",
    "attention_forward": _FORWARD,
    "attention_backward": _BACKWARD,
    "attention_forward_reference": _FORWARD,
    "attention_backward_reference": _BACKWARD,
    "attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, bool causal=True, "
        "SymInt window_left=-1, SymInt window_right=-1, float? scale=None, float softcap=0.0, Tensor? sinks=None, "
        "SymInt chunk_size=0) -> (Tensor out, Tensor lse)"
    ),
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"packattn::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- kernels in Python -----------------------------------------------------------------------------------------


def _fallback(name: str) -> Callable[..., Any]:
    """The reference as the kernel of an op that no compiled library serves on this device, with one warning."""
    function = getattr(reference, name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        devices = {a.device.type for a in args if isinstance(a, Tensor)} - {"cpu"}
        device = min(devices, default="cpu")
        why = f"packattn has no compiled kernels for device type {device!r}" if devices else _library.CPU.missing
        _library.warn_once(
            f"{device}: {why}",
            f"packattn: plain PyTorch serves {device} tensors: {why}. Results are the same, only slower.",
        )
        return function(*args, **kwargs)

    kernel.__name__ = name
    return kernel


def _unserved(name: str) -> Callable[..., Any]:
    """The reference as its own op: what a compiled kernel calls for inputs that it does not serve."""
    function = getattr(reference, name.removesuffix("_reference"))
    query_at = 0 if "forward" in name else 2

    def kernel(*args: Any) -> Any:
        q, v = args[query_at], args[query_at + 2]
        dtype = str(q.dtype).removeprefix("torch.")
        if _library.extension is not None and q.device.type == "cpu":
            why = "; ".join(_library.extension.cpu_refusals(dtype, q.shape[-1], v.shape[-1]))
            if why:
                _library.warn_once(
                    why, f"packattn: plain PyTorch serves this call: {why}. Results are the same, only slower."
                )
        return function(*args)

    kernel.__name__ = name
    return kernel


for _name in SCHEMAS:
    if _name == "attention":
        continue
    _make = _unserved if _name.endswith("_reference") else _fallback
    torch.library.impl(f"packattn::{_name}", "CompositeExplicitAutograd", _make(_name))


@torch.library.impl("packattn::attention", "CompositeImplicitAutograd")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    cu_q = cu_k = cu_seqlens_q
    total = query.shape[0]
    if cu_seqlens_k is None:  # the offsets serve both, so the shorter side bounds them
        total = min(total, key.shape[0])
    else:
        cu_k = cu_seqlens_k
        checks.cu_seqlens("attention", cu_k, key.shape[0], "cu_seqlens_k")
    checks.cu_seqlens("attention", cu_q, total, "cu_seqlens_q")
    begin, end, diagonal, _ = torch.ops.packattn.document_ranges(
        cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], query.shape[0]
    )
    key_begin, key_end = torch.ops.packattn.key_ranges(
        begin, end, diagonal, None, causal, window_left, window_right, chunk_size
    )
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale  # attention_forward refuses a head_dim of 0
    out, lse = torch.ops.packattn.attention_forward(query, key, value, key_begin, key_end, sinks, scale, softcap)
    return out, lse


# ---- fakes: shapes, dtypes and strides of the outputs ------------------------------------------------------------


def _entries(max_segments: int | None, more: int = 0) -> Any:
    """The capacity + more. An unknown count must itself be a size of the output, so `more` is in the new symbol."""
    return torch.library.get_ctx().new_dynamic_size(min=more) if max_segments is None else max_segments + more


@torch.library.register_fake("packattn::cu_seqlens_from_lengths")
def _(lengths: Tensor) -> Tensor:
    checks.integers("cu_seqlens_from_lengths", "lengths", lengths)
    return lengths.new_empty(lengths.numel() + 1, dtype=torch.int32)


@torch.library.register_fake("packattn::cu_seqlens_from_segment_ids")
def _(segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None) -> Tensor:
    checks.ids("cu_seqlens_from_segment_ids", "segment_ids", segment_ids)
    return segment_ids.new_empty(_entries(max_segments, 1), dtype=torch.int32)


@torch.library.register_fake("packattn::cu_seqlens_from_position_ids")
def _(position_ids: Tensor, rule: str = "step", max_segments: int | None = None) -> Tensor:
    checks.ids("cu_seqlens_from_position_ids", "position_ids", position_ids)
    checks.rule("cu_seqlens_from_position_ids", rule)
    return position_ids.new_empty(_entries(max_segments, 1), dtype=torch.int32)


@torch.library.register_fake("packattn::documents_from_segment_ids")
def _(segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None) -> tuple[Tensor, ...]:
    checks.ids("documents_from_segment_ids", "segment_ids", segment_ids)
    n = _entries(max_segments)
    return tuple(segment_ids.new_empty(n, dtype=torch.int32) for _ in range(2))


@torch.library.register_fake("packattn::position_ids_from_cu_seqlens")
def _(cu_seqlens: Tensor, total: int) -> Tensor:
    checks.cu_seqlens("position_ids_from_cu_seqlens", cu_seqlens, None)
    return cu_seqlens.new_empty(total, dtype=torch.int64)


@torch.library.register_fake("packattn::segment_ids_from_cu_seqlens")
def _(cu_seqlens: Tensor, total: int) -> Tensor:
    checks.cu_seqlens("segment_ids_from_cu_seqlens", cu_seqlens, None)
    return cu_seqlens.new_empty(total, dtype=torch.int32)


@torch.library.register_fake("packattn::document_ranges")
def _(starts_q: Tensor, ends_q: Tensor, starts_k: Tensor, ends_k: Tensor, total_q: int) -> tuple[Tensor, ...]:
    checks.documents("document_ranges", starts_q, ends_q, starts_k, ends_k, total_q)
    return tuple(starts_q.new_empty(total_q, dtype=torch.int32) for _ in range(4))


@torch.library.register_fake("packattn::key_ranges")
def _(
    begin: Tensor,
    end: Tensor,
    diagonal: Tensor | None,
    prefix_end: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    checks.pattern("key_ranges", begin, end, diagonal, prefix_end, window_left, window_right, chunk_size)
    return tuple(begin.new_empty(begin.shape[0], dtype=torch.int32) for _ in range(2))


@torch.library.register_fake("packattn::query_ranges")
def _(key_begin: Tensor, key_end: Tensor, total_k: int) -> tuple[Tensor, ...]:
    checks.ranges("query_ranges", key_begin, key_end)
    return tuple(key_begin.new_empty(total_k, dtype=torch.int32) for _ in range(2))


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    checks.attention("attention_forward", query, key, value, key_begin, key_end, sinks, scale, softcap)
    total_q, heads_q, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty(total_q, heads_q, value.shape[2]),
        query.new_empty(heads_q, total_q, dtype=lse_dtype),
    )


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    checks.attention("attention_backward", query, key, value, key_begin, key_end, sinks, scale, softcap)
    checks.gradients("attention_backward", dout, dlse, query, value, out, lse)
    dsinks = query.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(x.new_empty(x.shape) for x in (query, key, value)), dsinks)


for _suffix in ("", "_reference"):
    torch.library.register_fake(f"packattn::attention_forward{_suffix}", _forward_fake)
    torch.library.register_fake(f"packattn::attention_backward{_suffix}", _backward_fake)


# ---- autograd ------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, key_begin, key_end, sinks, scale, softcap = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, key_begin, key_end, sinks)
    ctx.scale, ctx.softcap = scale, softcap
    ctx.set_materialize_grads(False)


def _backward_through(op: Any) -> Callable[..., Any]:
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, key_begin, key_end, sinks = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = op(
            dout, dlse, query, key, value, out, lse, key_begin, key_end, sinks, ctx.scale, ctx.softcap
        )
        return dq, dk, dv, None, None, None if sinks is None else dsinks, None, None

    return backward


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "packattn: attention has no second derivative; use torch.autograd.grad without create_graph=True, or plain "
        "PyTorch attention where a double backward is needed"
    )


for _suffix in ("", "_reference"):
    torch.library.register_autograd(
        f"packattn::attention_forward{_suffix}",
        _backward_through(getattr(torch.ops.packattn, f"attention_backward{_suffix}")),
        setup_context=_setup_context,
    )
    torch.library.register_autograd(f"packattn::attention_backward{_suffix}", _no_double_backward)


# ---- autocast ------------------------------------------------------------------------------------------------


def _autocast(device_type: str) -> Callable[..., Any]:
    """As scaled_dot_product_attention: floating inputs go to the autocast dtype; float64 stays, integers are refused."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_begin: Tensor,
        key_end: Tensor,
        sinks: Tensor | None,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, ...]:
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (
            x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value)
        )
        with torch.autocast(device_type, enabled=False):
            out, lse = torch.ops.packattn.attention_forward(q, k, v, key_begin, key_end, sinks, scale, softcap)
        return out, lse

    return forward


torch.library.impl("packattn::attention_forward", "AutocastCPU", _autocast("cpu"))
torch.library.impl("packattn::attention_forward", "AutocastCUDA", _autocast("cuda"))
