"""The demo's documents as packed rows and as padded batches of the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import packattn


@dataclass(frozen=True)
class PackedRows:
    """Rows of `capacity` tokens laid end to end, T = rows * capacity."""

    tokens: Tensor  # int64 [T]
    labels: Tensor  # int64 [T], -100 on the first token of a document and on padding
    packing: packattn.Packing
    documents: list[Tensor]  # the documents inside, int64 [length] each, in order
    rows: int

    @property
    def real_tokens(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class PaddedBatch:
    """Documents as the rows of a batch, padded to the longest."""

    tokens: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S], -100 on the first token and on padding


def assign(documents: Sequence[Tensor], capacity: int) -> list[list[Tensor]]:
    """The documents of each row, by best fit decreasing; one longer than a row is split into documents of their own."""
    bins = packattn.pack([len(document) for document in documents], capacity, algorithm="bfd_split")
    return [[documents[item][start : start + length] for item, start, length in row] for row in bins]


def pack_rows(rows: Sequence[Sequence[Tensor]], capacity: int) -> PackedRows:
    """Lay the documents of each row side by side, fill the row with padding, and lay the rows end to end."""
    tokens = torch.zeros(len(rows), capacity, dtype=torch.int64)
    segments = torch.full((len(rows), capacity), -1, dtype=torch.int32)
    number = 0
    for row, documents in enumerate(rows):
        begin = 0
        for document in documents:
            end = begin + len(document)
            tokens[row, begin:end] = document
            segments[row, begin:end] = number
            begin, number = end, number + 1
    packing = packattn.Packing.from_segment_ids(segments, pad_id=-1)
    tokens = tokens.flatten()
    labels = packattn.mask_labels(tokens, packing)
    return PackedRows(tokens, labels, packing, [document for row in rows for document in row], len(rows))


def pad(documents: Sequence[Tensor], batch_size: int) -> list[PaddedBatch]:
    """Batches of `batch_size` documents in the given order, each padded to its longest document."""
    batches = []
    for first in range(0, len(documents), batch_size):
        chosen = documents[first : first + batch_size]
        tokens = torch.nn.utils.rnn.pad_sequence(list(chosen), batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(list(chosen), batch_first=True, padding_value=-100)
        labels[:, 0] = -100
        batches.append(PaddedBatch(tokens, labels))
    return batches
