"""Packed sequences for PyTorch: attention that stays inside documents, the metadata it needs, and proof that it does."""

from . import ops as _ops  # noqa: F401  (registers torch.ops.packattn before anything can be traced)
from . import verify
from ._version import __version__
from .data import PackedCollator, StreamPacker, count_units, loss_weights, pack_dataset
from .dropins import flash_attn_varlen_func, varlen_attn
from .functional import attention, dense_mask
from .labels import mask_labels
from .metadata import (
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    cu_seqlens_from_segment_ids,
    position_ids_from_cu_seqlens,
    segment_ids_from_cu_seqlens,
)
from .packer import Bins, pack
from .packing import Packing

__all__ = [
    "Bins",
    "PackedCollator",
    "Packing",
    "StreamPacker",
    "__version__",
    "attention",
    "count_units",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "cu_seqlens_from_segment_ids",
    "dense_mask",
    "flash_attn_varlen_func",
    "loss_weights",
    "mask_labels",
    "pack",
    "pack_dataset",
    "position_ids_from_cu_seqlens",
    "segment_ids_from_cu_seqlens",
    "varlen_attn",
    "verify",
]
