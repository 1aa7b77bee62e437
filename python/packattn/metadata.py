"""Conversions between the ways frameworks say where the documents of a packed row lie.

Where a compiled op serves the call, it is the op that refuses, with a RuntimeError in place of the ValueError below.
Values are checked on the CPU, and on other devices under ``PACKATTN_VALIDATE=1`` (it waits for the device)."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401  (the ops must be registered)


def cu_seqlens_from_lengths(lengths: Iterable[int] | Tensor) -> Tensor:
    """Offsets of documents with these lengths.

    Args:
        lengths: integers [N] or zero-padded [B, n], read in order: a list [N], or an int32 or int64 tensor.

    Returns:
        int32 [N + 1], from 0 to the sum.

    Raises:
        ValueError: a negative length, or more than 2**31 - 1 tokens.
        TypeError: lengths that are not integers.
    """
    if not isinstance(lengths, Tensor):
        came = lengths
        try:
            values = list(came)  # once: an iterator has nothing left for a second look
            if any(isinstance(n, bool) for n in values):
                raise TypeError
            values = [operator.index(n) for n in values]
        except TypeError:
            raise TypeError(f"cu_seqlens_from_lengths: lengths must be integers, got {checks.describe(came)}") from None
        if values and not -(2**63) <= min(values) <= max(values) < 2**63:
            raise ValueError(
                f"cu_seqlens_from_lengths: lengths must be from 0 to {checks.INT32_MAX}, got {max(values, key=abs)}"
            )
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
        if isinstance(plane, bool) or not isinstance(plane, int):
            raise TypeError(f"cu_seqlens_from_position_ids: plane must be an integer, got {checks.describe(plane)}")
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
