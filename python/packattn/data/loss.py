"""Weights with which a sum over tokens becomes the mean that is wanted, over however many batches."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .. import checks
from ..labels import mask_labels
from ..packing import Packing

Average = Literal["token", "document", "pair"]


def loss_weights(
    labels: Tensor,
    packing: Packing,
    average: Average = "token",
    *,
    total: int | Tensor | None = None,
    shifted: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """A weight for every label, so that ``(weights * loss_per_token).sum()`` is a mean.

    Under gradient accumulation, and over ranks, a mean of means is not the mean. Pass the ``total`` of units of all
    batches of the step (the sum of :func:`count_units`); the weighted sums then add up to the mean over all of them. (What
    averages gradients over ranks, as DistributedDataParallel does, wants the loss times the number of ranks.)

    Args:
        labels: int64 [T] or [B, S], the packing's tokens row by row. Labels across document boundaries count as masked
            (see :func:`packattn.mask_labels`).
        average: "token": every trained token counts the same. "document": every document with a trained token counts the
            same. "pair": every run of trained tokens counts the same (each answer of a conversation).
        total: units to divide by; None: those of this batch.
        shifted, ignore_index: as in :func:`packattn.mask_labels`.

    Returns:
        float32, of the labels' shape; 0 where nothing is trained. All 0 for a batch without trained tokens.

    Raises:
        ValueError: an unknown average, or labels that do not fit the packing.
    """
    trained, unit = _units(labels, packing, average, shifted, ignore_index)
    size = torch.zeros(trained.numel() + 1, dtype=torch.float32, device=labels.device)
    size = size.scatter_add(0, unit, trained.float())
    if total is not None and (not isinstance(total, Tensor) or checks.readable(total)) and bool(total < 0):
        raise ValueError(f"loss_weights: total must not be negative, got {total}")
    units = (size > 0).sum() if total is None else torch.as_tensor(total, device=labels.device)
    weights = torch.where(trained, 1 / size[unit].clamp(min=1), 0) / units.clamp(min=1)
    return weights.reshape(labels.shape)


def count_units(
    labels: Tensor, packing: Packing, average: Average = "token", *, shifted: bool = False, ignore_index: int = -100
) -> Tensor:
    """How many units (trained tokens, documents or runs) a batch has: int64 scalar, to be summed over the batches and
    ranks of a step. Arguments as in :func:`loss_weights`."""
    trained, unit = _units(labels, packing, average, shifted, ignore_index)
    size = torch.zeros(trained.numel() + 1, dtype=torch.int64, device=labels.device)
    return (size.scatter_add(0, unit, trained.long()) > 0).sum()


def _units(
    labels: Tensor, packing: Packing, average: Average, shifted: bool, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Which labels are trained, bool [T], and the number of the unit that each belongs to, int64 [T] below T + 1."""
    if average not in get_args(Average):
        raise ValueError(f"average must be one of {', '.join(get_args(Average))}, got {average!r}")
    masked = mask_labels(labels, packing, shifted, ignore_index).reshape(-1)
    trained = masked != ignore_index
    count = trained.numel()
    index = torch.arange(count, device=labels.device)
    if average == "token":
        return trained, index
    if average == "document":
        return trained, torch.where(trained, packing.begin.long(), count)
    before = torch.nn.functional.pad(trained, (1, 0))[:-1]
    same = torch.nn.functional.pad(packing.segment_ids, (1, 0), value=-1)[:-1] == packing.segment_ids
    starts = trained & ~(before & same)
    return trained, torch.where(starts, index, 0).cummax(0).values if count else index
