"""What attention must give: the mask and the float64 result, written from their definitions.

On purpose this shares no code with the rest of the package: not the key ranges, not packattn.reference. Token by token
and key by key, so that a mistake in the ranges cannot hide in its own expectation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .report import Spans


def expected_mask(
    documents_q: Spans,
    documents_k: Spans,
    total_q: int,
    total_k: int,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Sequence[int] | None = None,
) -> Tensor:
    """bool [total_q, total_k], True where the row sees the key.

    Document n of the queries sees document n of the keys, aligned at their last tokens. Rows and keys in no document
    are padding: they see nothing and nothing sees them.
    """
    left, right = window_size
    mask = torch.zeros(total_q, total_k, dtype=torch.bool)
    for document, ((row, row_end), (key, key_end)) in enumerate(zip(documents_q, documents_k, strict=True)):
        length_q, length_k = row_end - row, key_end - key
        prefix = prefix_lengths[document] if prefix_lengths is not None else 0

        def sees(i: int, j: int, shift: int = length_k - length_q, prefix: int = prefix) -> bool:
            place = i + shift  # of the query among its document's keys; negative: before all of them
            late_enough = (left < 0 or j >= place - left) and (chunk_size <= 0 or j >= place // chunk_size * chunk_size)
            early_enough = (not causal or j <= place) and (right < 0 or j <= place + right)
            return late_enough and (early_enough or j < prefix)

        block = [[sees(i, j) for j in range(length_k)] for i in range(length_q)]
        if length_q and length_k:
            mask[row:row_end, key:key_end] = torch.tensor(block)
    return mask


@dataclasses.dataclass(frozen=True)
class Formula:
    """softmax(scale * q k^T) v under a mask, densely, in whatever dtype it is given.

    mask: bool [Tq, Tk]. sinks: [Hq], a logit per head that takes part in the softmax and has no value.
    """

    mask: Tensor
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] -> out [Tq, Hq, Dv], lse [Hq, Tq]; differentiable.

        A row that sees nothing gives out 0 and lse -inf, and no gradient.
        """
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        if self.softcap > 0:
            score = self.softcap * torch.tanh(score / self.softcap)
        sees = self.mask.any(-1)
        # Rows that see nothing get finite scores here and are cut below: no NaN may come near the gradients.
        score = score.masked_fill(~self.mask & sees[:, None], -math.inf)
        lse = score.logsumexp(-1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.to(lse)[:, None].expand_as(lse))
        weight = (score - lse[..., None]).exp() * sees[:, None]
        out = torch.einsum("hij,jhd->ihd", weight, v)
        return out, lse.masked_fill(~sees, -math.inf)
