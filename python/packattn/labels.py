"""Labels of packed rows: no token is trained to predict the first token of the next document."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .packing import Packing


def mask_labels(labels: Tensor, packing: Packing, shifted: bool = False, ignore_index: int = -100) -> Tensor:
    """Labels in which nothing is predicted across the boundary of two documents, nor in padding.

    The loss of packed rows then equals that of the documents alone. Every other label is kept, also where it is
    ``ignore_index`` already. Works in compiled functions and does not wait for the device.

    Args:
        labels: int16, int32 or int64, [T] or [B, S] with B * S == T: the packing's tokens row by row.
        packing: where the documents lie, on the labels' device.
        shifted: what the labels are. False: labels are the token ids themselves and the model shifts them (Hugging
            Face models), so the first label of each document goes. True: label t is the token after t already
            (torchtitan, Megatron), so the last label of each document goes.
        ignore_index: the label that the loss leaves out.

    Returns:
        A new tensor of the labels' shape and dtype.

    Raises:
        TypeError: labels or ignore_index are no integers, or packing is no Packing.
        ValueError: labels of another number of tokens or on another device, or an ignore_index their dtype cannot hold.
    """
    if not isinstance(packing, Packing):
        raise TypeError(f"mask_labels: packing must be a packattn.Packing, got {type(packing).__name__}")
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32, torch.int16):
        raise TypeError(f"mask_labels: labels must be int16, int32 or int64, got {checks.describe(labels)}")
    if labels.dim() not in (1, 2) or labels.numel() != packing.total:
        raise ValueError(
            f"mask_labels: labels must be [T] or [B, S] with the packing's {packing.total} tokens, got "
            + checks.describe(labels)
        )
    if labels.device != packing.device:
        raise ValueError(f"mask_labels: labels are on {labels.device}, but packing is on {packing.device}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):  # a float would make the labels float
        raise TypeError(f"mask_labels: ignore_index must be an integer, got {checks.describe(ignore_index)}")
    limits = torch.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(f"mask_labels: ignore_index must fit {labels.dtype}, got {ignore_index}")
    rows = torch.arange(packing.total, device=labels.device)
    crossing = rows == packing.end - 1 if shifted else rows == packing.begin
    dropped = (crossing | packing.is_padding).reshape(labels.shape)
    return torch.where(dropped, ignore_index, labels)
