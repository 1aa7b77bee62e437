"""The torch ops: one place for every schema, fake, autograd formula and autocast rule of ``torch.ops.packattn``.

The compiled libraries (csrc/ops) only add kernels to these schemas. Where there is none (another device, a build without
it), the dispatcher takes :mod:`packattn.reference`; where there is one that does not serve the inputs (float64, an odd
head dim), that kernel calls ``attention_*_reference`` itself. Either way the ops exist with the same schemas.

:func:`register` makes all of it for one namespace. The library has one, ``packattn``; tests make another for kernels that
are to be run beside these.
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


# ---- kernels in Python -----------------------------------------------------------------------------------------


def _fallback(name: str) -> Callable[..., Any]:
    """The reference as the kernel of an op that no compiled library serves on this device, with one warning."""
    function = getattr(reference, name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        devices = {a.device.type for a in args if isinstance(a, Tensor)} - {"cpu"}
        device = min(devices, default="cpu")
        why = _library.missing(device)
        _library.warn_once(
            f"{device}: {why}",
            f"packattn: plain PyTorch serves {device} tensors: {why}. Results are the same, only slower.",
        )
        return function(*args, **kwargs)

    kernel.__name__ = name
    return kernel


def _unserved(name: str, refusals: Callable[[str, str, int, int], list[str]]) -> Callable[..., Any]:
    """The reference as its own op: what a compiled kernel calls for inputs that it does not serve.

    refusals(device type, dtype, head_dim, head_dim_v): why it does not.
    """
    function = getattr(reference, name.removesuffix("_reference"))
    query_at = 0 if "forward" in name else 2

    def kernel(*args: Any) -> Any:
        q, v = args[query_at], args[query_at + 2]
        dtype = str(q.dtype).removeprefix("torch.")
        why = "; ".join(refusals(q.device.type, dtype, q.shape[-1], v.shape[-1]))
        if why:
            _library.warn_once(
                why, f"packattn: plain PyTorch serves this call: {why}. Results are the same, only slower."
            )
        return function(*args)

    kernel.__name__ = name
    return kernel


def _composite(ops: Any) -> Callable[..., Any]:
    """``attention`` out of the other ops of its namespace."""

    def attention(
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
        begin, end, diagonal, _ = ops.document_ranges(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], query.shape[0])
        key_begin, key_end = ops.key_ranges(begin, end, diagonal, None, causal, window_left, window_right, chunk_size)
        scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale  # attention_forward refuses a head_dim of 0
        out, lse = ops.attention_forward(query, key, value, key_begin, key_end, sinks, scale, softcap)
        return out, lse

    return attention


# ---- fakes: shapes, dtypes and strides of the outputs ------------------------------------------------------------


def _entries(max_segments: int | None, more: int = 0) -> Any:
    """The capacity + more. An unknown count must itself be a size of the output, so `more` is in the new symbol."""
    return torch.library.get_ctx().new_dynamic_size(min=more) if max_segments is None else max_segments + more


def _fake_cu_seqlens_from_lengths(lengths: Tensor) -> Tensor:
    checks.integers("cu_seqlens_from_lengths", "lengths", lengths)
    return lengths.new_empty(lengths.numel() + 1, dtype=torch.int32)


def _fake_cu_seqlens_from_segment_ids(
    segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
) -> Tensor:
    checks.ids("cu_seqlens_from_segment_ids", "segment_ids", segment_ids)
    return segment_ids.new_empty(_entries(max_segments, 1), dtype=torch.int32)


def _fake_cu_seqlens_from_position_ids(
    position_ids: Tensor, rule: str = "step", max_segments: int | None = None
) -> Tensor:
    checks.ids("cu_seqlens_from_position_ids", "position_ids", position_ids)
    checks.rule("cu_seqlens_from_position_ids", rule)
    return position_ids.new_empty(_entries(max_segments, 1), dtype=torch.int32)


def _fake_documents_from_segment_ids(
    segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
) -> tuple[Tensor, ...]:
    checks.ids("documents_from_segment_ids", "segment_ids", segment_ids)
    n = _entries(max_segments)
    return tuple(segment_ids.new_empty(n, dtype=torch.int32) for _ in range(2))


def _fake_position_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    checks.cu_seqlens("position_ids_from_cu_seqlens", cu_seqlens, None)
    return cu_seqlens.new_empty(total, dtype=torch.int64)


def _fake_segment_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    checks.cu_seqlens("segment_ids_from_cu_seqlens", cu_seqlens, None)
    return cu_seqlens.new_empty(total, dtype=torch.int32)


def _fake_document_ranges(
    starts_q: Tensor, ends_q: Tensor, starts_k: Tensor, ends_k: Tensor, total_q: int
) -> tuple[Tensor, ...]:
    checks.documents("document_ranges", starts_q, ends_q, starts_k, ends_k, total_q)
    return tuple(starts_q.new_empty(total_q, dtype=torch.int32) for _ in range(4))


def _fake_key_ranges(
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


def _fake_query_ranges(key_begin: Tensor, key_end: Tensor, total_k: int) -> tuple[Tensor, ...]:
    checks.ranges("query_ranges", key_begin, key_end)
    return tuple(key_begin.new_empty(total_k, dtype=torch.int32) for _ in range(2))


def _fake_forward(
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


def _fake_backward(
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


FAKES: dict[str, Callable[..., Any]] = {
    "cu_seqlens_from_lengths": _fake_cu_seqlens_from_lengths,
    "cu_seqlens_from_segment_ids": _fake_cu_seqlens_from_segment_ids,
    "cu_seqlens_from_position_ids": _fake_cu_seqlens_from_position_ids,
    "documents_from_segment_ids": _fake_documents_from_segment_ids,
    "position_ids_from_cu_seqlens": _fake_position_ids_from_cu_seqlens,
    "segment_ids_from_cu_seqlens": _fake_segment_ids_from_cu_seqlens,
    "document_ranges": _fake_document_ranges,
    "key_ranges": _fake_key_ranges,
    "query_ranges": _fake_query_ranges,
    "attention_forward": _fake_forward,
    "attention_backward": _fake_backward,
    "attention_forward_reference": _fake_forward,
    "attention_backward_reference": _fake_backward,
}


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


# ---- autocast ------------------------------------------------------------------------------------------------


def _autocast(ops: Any, device_type: str) -> Callable[..., Any]:
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
            out, lse = ops.attention_forward(q, k, v, key_begin, key_end, sinks, scale, softcap)
        return out, lse

    return forward


# ---- all of it, for one namespace ----------------------------------------------------------------------------------


def register(
    namespace: str, refusals: Callable[[str, str, int, int], list[str]] = _library.refusals, fallback: bool = True
) -> None:
    """Define every op in ``torch.ops.<namespace>``: schema, fake, autograd, autocast, and kernels in plain PyTorch.

    refusals: as for :func:`_unserved`. fallback: whether plain PyTorch serves devices that have no compiled kernel;
    otherwise such a call is an error of the dispatcher.
    """
    for name, schema in SCHEMAS.items():
        torch.library.define(f"{namespace}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    ops = getattr(torch.ops, namespace)
    for name, fake in FAKES.items():
        if name.endswith("_reference"):
            torch.library.impl(f"{namespace}::{name}", "CompositeExplicitAutograd", _unserved(name, refusals))
        elif fallback:
            torch.library.impl(f"{namespace}::{name}", "CompositeExplicitAutograd", _fallback(name))
        torch.library.register_fake(f"{namespace}::{name}", fake)
    torch.library.impl(f"{namespace}::attention", "CompositeImplicitAutograd", _composite(ops))
    for suffix in ("", "_reference"):
        torch.library.register_autograd(
            f"{namespace}::attention_forward{suffix}",
            _backward_through(getattr(ops, f"attention_backward{suffix}")),
            setup_context=_setup_context,
        )
        torch.library.register_autograd(f"{namespace}::attention_backward{suffix}", _no_double_backward)
    for device_type in ("cpu", "cuda"):
        torch.library.impl(
            f"{namespace}::attention_forward", f"Autocast{device_type.upper()}", _autocast(ops, device_type)
        )


register("packattn")
