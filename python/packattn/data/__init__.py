"""From documents to packed batches: datasets, streams, collators and the weights of the loss."""

from .collator import PackedCollator
from .dataset import pack_dataset
from .loss import count_units, loss_weights
from .stream import StreamPacker

__all__ = ["PackedCollator", "StreamPacker", "count_units", "loss_weights", "pack_dataset"]
