"""Sentence embeddings without padding: sentences of any length packed into full rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._modes import eval_mode
from ..packer import Bins, pack
from ..packing import Packing
from . import transformers as hf


@torch.no_grad()
def embed(
    model: Any,
    documents: Sequence[Sequence[int]],
    *,
    capacity: int = 4096,
    pooling: Literal["mean", "cls"] = "mean",
    normalize: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Embeddings of tokenised documents (special tokens included), float32 [N, E], in their order, on the CPU.

    Args:
        model: a transformers encoder with ``attn_implementation="packattn"``. It is run in eval mode, whatever its mode is
            (dropout would give every call other embeddings); each module's mode is as before afterwards.
        documents: token ids of each document; none may be empty, nor longer than the model's positions.
        capacity: tokens of a packed row. The row may be longer than the model's positions: they restart.
        pooling: "mean" over the tokens of a document, or its first token ("cls").
        normalize: to length 1.
        progress(done, total): called after each row.

    Raises:
        ValueError: another attention implementation, an empty document, or one longer than the capacity or the model.
    """
    if hf.attention is not ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation):
        raise ValueError(
            "embed: model must use packattn, or the documents of a row see each other; call "
            'packattn.integrations.transformers.register() and model.set_attn_implementation("packattn"), got '
            f"{model.config._attn_implementation!r}"
        )
    if pooling not in ("mean", "cls"):
        raise ValueError(f'embed: pooling must be "mean" or "cls", got {pooling!r}')
    lengths = np.array([len(d) for d in documents], dtype=np.int64)
    longest = getattr(model.config, "max_position_embeddings", None)
    first = hf.first_position(model)
    limit = capacity if longest is None else min(capacity, longest - first)
    for number in np.flatnonzero((lengths == 0) | (lengths > limit)):
        raise ValueError(f"embed: documents must have 1 to {limit} tokens, document {number} has {lengths[number]}")
    with eval_mode(model):
        return _embed(model, documents, pack(lengths, capacity), first, pooling, normalize, progress)


def _embed(
    model: Any,
    documents: Sequence[Sequence[int]],
    bins: Bins,
    first: int,
    pooling: str,
    normalize: bool,
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    result: Tensor | None = None
    for done, row in enumerate(bins):
        items = [item for item, _, _ in row]
        ids = torch.tensor([t for item in items for t in documents[item]], device=model.device)
        packing = Packing.from_lengths([length for _, _, length in row], device=model.device)
        positions = packing.position_ids[None] + first
        out = model(ids[None], position_ids=positions, packing=packing).last_hidden_state[0].float()
        if pooling == "cls":
            pooled = out[packing.starts.long()]
        else:
            pooled = out.new_zeros(len(items), out.shape[1]).index_add_(0, packing.segment_ids, out)
            pooled /= packing.lengths[:, None]
        if normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        if result is None:
            result = torch.empty(len(documents), pooled.shape[1])
        result[items] = pooled.cpu()
        if progress is not None:
            progress(done + 1, len(bins))
    return torch.empty(0, model.config.hidden_size) if result is None else result
