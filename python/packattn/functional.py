"""Attention over a :class:`packattn.Packing`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks
from .packing import Packing, expect


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    packing_k: Packing | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    chunk_size: int = ...,
    prefix_lengths: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    packing_k: Packing | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    chunk_size: int = ...,
    prefix_lengths: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    packing_k: Packing | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0,  # not 0.0: torch.compile(dynamic=True) would make a symbol of it and compile twice
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside the documents of a packed row, differentiable in q, k, v and sinks.

    Args:
        q: [T, Hq, D], float32, bfloat16, float16 or float64; any strides.
        k: [Tk, Hkv, D]. Hq is a multiple of Hkv: query head h reads key head ``h // (Hq // Hkv)``.
        v: [Tk, Hkv, Dv].
        packing: where the documents of q (and of k, v) lie; ``packing.total == T``.
        packing_k: where the documents of k and v lie, if elsewhere: document n of q attends to document n of k,
            aligned at their last tokens.
        causal, window_size, chunk_size, prefix_lengths: what a token sees of its document; see
            :meth:`packattn.Packing.key_ranges`.
        scale: factor on the scores; 1 / sqrt(D) if None.
        softcap: if > 0, scores become ``softcap * tanh(scores / softcap)``.
        sinks: [Hq], a logit per head that takes part in the softmax with the value 0.
        return_lse: also return the log-sum-exp of each row's scores (the sink included), float32 [Hq, T], natural
            log, differentiable.

    Returns:
        [T, Hq, Dv] in q's dtype. Rows that see no key (padding, for instance) are 0, with lse -inf and gradient 0.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value; the message names it. A
            RuntimeError where it is a compiled op that refuses.
        NotImplementedError: forward-mode derivatives (``torch.func.jvp``), which torch would otherwise take for 0, and
            ``torch.func.grad``.
    """
    expect(packing, "attention: packing")
    if packing_k is not None:
        expect(packing_k, "attention: packing_k")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(
                f"attention: {name} must be 3-D [T, heads, head_dim] (flatten batch and tokens), got {checks.describe(x)}"
            )
        if x.layout != torch.strided:
            raise ValueError(f"attention: {name} must be a dense tensor, got layout {x.layout}")
    if not torch.compiler.is_compiling() and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, sinks)
    ):
        raise NotImplementedError(
            "attention: no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use backward, or plain "
            "PyTorch attention where forward mode is needed"
        )
    other = packing if packing_k is None else packing_k
    for name, x, where, p in (
        ("q", q, "packing", packing),
        ("k", k, "packing" if packing_k is None else "packing_k", other),
    ):
        if x.shape[0] != p.total:
            raise ValueError(f"attention: {name} must have {where}.total = {p.total} tokens, got {checks.describe(x)}")
        if x.device != p.device:
            raise ValueError(
                f"attention: {where} must be on {x.device} like {name}, got {p.device}; use {where}.to(...)"
            )
    key_begin, key_end = packing.key_ranges(
        packing_k, causal=causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths
    )
    scale = (q.shape[-1] or 1) ** -0.5 if scale is None else _number("scale", scale)  # the op refuses a head_dim of 0
    forward = torch.ops.packattn.attention_forward if torch.compiler.is_compiling() else _forward
    out, lse = forward(q, k, v, key_begin, key_end, sinks, scale, _number("softcap", softcap))
    return (out, lse) if return_lse else out


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    try:
        out, lse = torch.ops.packattn.attention_forward(*arguments)
    except RuntimeError as error:
        if "functorch transforms" not in str(error):
            raise
        raise NotImplementedError(  # torch.library's autograd does not know them, and torch's message is for its authors
            "attention: torch.func.grad, vjp and jacrev do not reach this op; use torch.autograd.grad or backward()"
        ) from error
    return out, lse


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"attention: {name} must be a number, got a tensor that requires grad: it would get no gradient"
        )
    if not hasattr(value, "__float__") or (isinstance(value, Tensor) and value.numel() != 1):
        raise TypeError(f"attention: {name} must be a number, got {checks.describe(value)}")
    return float(value)


def dense_mask(
    packing: Packing,
    packing_k: Packing | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
) -> Tensor:
    """The mask as bool [T, Tk], True where the row sees the key: to look at, or for attention that takes dense masks.

    Arguments and errors as in :meth:`packattn.Packing.key_ranges`.
    """
    expect(packing, "dense_mask: packing")
    key_begin, key_end = packing.key_ranges(
        packing_k, causal=causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths
    )
    j = torch.arange((packing if packing_k is None else packing_k).total, device=packing.device)
    return (j >= key_begin[:, None]) & (j < key_end[:, None])
