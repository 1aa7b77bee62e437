"""The functions of the public API that are not methods of :class:`packattn.Packing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401  (the ops must be registered)

if TYPE_CHECKING:
    from .packing import Packing


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
    softcap: float = 0.0,
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
        ValueError: an argument of the wrong shape, dtype, device or value; the message names it.
    """
    if q.dim() != 3:
        raise ValueError(
            f"attention: q must be 3-D [T, heads, head_dim] (flatten batch and tokens), got {checks.describe(q)}"
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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.ops.packattn.attention_forward(q, k, v, key_begin, key_end, sinks, float(scale), float(softcap))
    return (out, lse) if return_lse else out


def dense_mask(
    packing: Packing,
    packing_k: Packing | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
) -> Tensor:
    """The mask as bool [T, Tk], True where the row sees the key: to look at, or for attention that takes dense masks."""
    key_begin, key_end = packing.key_ranges(
        packing_k, causal=causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths
    )
    j = torch.arange((packing if packing_k is None else packing_k).total, device=packing.device)
    return (j >= key_begin[:, None]) & (j < key_end[:, None])


def cu_seqlens_from_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Offsets of documents with these lengths.

    Args:
        lengths: integers [N] or zero-padded [B, n], read in order; a list or a tensor.

    Returns:
        int32 [N + 1], from 0 to the sum.

    Raises:
        ValueError: a negative length, or more than 2**31 - 1 tokens.
        TypeError: lengths that are not integers.
    """
    if not isinstance(lengths, Tensor):
        values = list(lengths)
        if any(not isinstance(n, int) or isinstance(n, bool) for n in values):
            try:
                values = [n.__index__() for n in values]
            except AttributeError:
                raise TypeError(f"cu_seqlens_from_lengths: lengths must be integers, got {lengths!r}") from None
        lengths = torch.tensor(values, dtype=torch.int64)
    cu_seqlens: Tensor = torch.ops.packattn.cu_seqlens_from_lengths(lengths)
    return cu_seqlens


def cu_seqlens_from_segment_ids(
    segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
) -> Tensor:
    """Offsets of the segments of a stream: a boundary where the value changes and at every row start.

    Args:
        segment_ids: int32 or int64, [T] or [B, S].
        pad_id: the id of tokens that belong to no document. Padding at the end lies past the last offset; a run of
            padding elsewhere is an entry of its own, because offsets cannot skip it
            (:meth:`packattn.Packing.from_segment_ids` leaves its tokens out of attention).
        max_segments: M, to have a shape that does not depend on the data; otherwise M is counted (one sync).

    Returns:
        int32 [M + 1]; unused entries repeat the last offset.

    Raises:
        ValueError: ids of the wrong shape or dtype, or more segments than ``max_segments``.
    """
    cu_seqlens: Tensor = torch.ops.packattn.cu_seqlens_from_segment_ids(segment_ids, pad_id, max_segments)
    return cu_seqlens


def cu_seqlens_from_position_ids(
    position_ids: Tensor, rule: str = "step", max_segments: int | None = None, *, plane: int | None = None
) -> Tensor:
    """Offsets of the documents of a stream whose positions restart.

    Args:
        position_ids: int32 or int64, [T] or [B, S]; [P, B, S] with ``plane``.
        rule: "step": a document starts where ``pos[t] != pos[t - 1] + 1`` and at every row start; "zero": where
            ``pos[t] == 0`` and at every row start.
        max_segments: as in :func:`cu_seqlens_from_segment_ids`.
        plane: which plane of 3-D positions to read.

    Returns:
        int32 [M + 1].

    Raises:
        ValueError: positions of the wrong shape or dtype, an unknown rule, more documents than ``max_segments``.
    """
    if plane is not None:
        if position_ids.dim() != 3 or not -position_ids.shape[0] <= plane < position_ids.shape[0]:
            raise ValueError(
                f"cu_seqlens_from_position_ids: plane={plane} needs position_ids [P, B, S] with that plane, got "
                + checks.describe(position_ids)
            )
        position_ids = position_ids[plane]
    cu_seqlens: Tensor = torch.ops.packattn.cu_seqlens_from_position_ids(position_ids, rule, max_segments)
    return cu_seqlens


def position_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """Positions that restart in every document.

    Args:
        cu_seqlens: int32 or int64 offsets [N + 1].
        total: T, tokens of the row; those past the last offset count from 0 as one more document.

    Returns:
        int64 [T].

    Raises:
        ValueError: wrong offsets (values are checked on the CPU), or offsets past ``total``.
    """
    position_ids: Tensor = torch.ops.packattn.position_ids_from_cu_seqlens(cu_seqlens, total)
    return position_ids


def segment_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """The number of each token's document, int32 [T]; -1 past the last offset. Arguments as in
    :func:`position_ids_from_cu_seqlens`."""
    segment_ids: Tensor = torch.ops.packattn.segment_ids_from_cu_seqlens(cu_seqlens, total)
    return segment_ids
