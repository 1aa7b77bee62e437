"""Sentence embeddings without padding: sentences of any length packed into full rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        TypeError: documents that are no lists of token ids.
        ValueError: another attention implementation, an empty document, one longer than the capacity or the model, or a
            token that the model does not have.
    """
    if hf.attention is not ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation):
        raise ValueError(
            "embed: model must use packattn, or the documents of a row see each other; call "
            'packattn.integrations.transformers.register() and model.set_attn_implementation("packattn"), got '
            f"{model.config._attn_implementation!r}"
        )
    if pooling not in ("mean", "cls"):
        raise ValueError(f'embed: pooling must be "mean" or "cls", got {pooling!r}')
    tokens = _tokens(model, documents)
    lengths = np.array([d.numel() for d in tokens], dtype=np.int64)
    longest = getattr(model.config, "max_position_embeddings", None)
    first = hf.first_position(model)
    limit = capacity if longest is None else min(capacity, longest - first)
    for number in np.flatnonzero((lengths == 0) | (lengths > limit)):
        raise ValueError(f"embed: documents must have 1 to {limit} tokens, document {number} has {lengths[number]}")
    with eval_mode(model):
        return _embed(model, tokens, pack(lengths, capacity), first, pooling, normalize, progress)


def _tokens(model: Any, documents: Any) -> list[Tensor]:
    if isinstance(documents, (str, Mapping)):
        raise TypeError(
            f"embed: documents must be lists of token ids, got one {type(documents).__name__}; pass the input_ids of a "
            "tokenizer that does not pad"
        )
    tokens = []
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for number, document in enumerate(documents):
        try:
            ids = torch.as_tensor(document)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.zeros(1, 1)
        if ids.dim() != 1 or (ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool)):
            raise TypeError(f"embed: documents[{number}] must be a flat list of token ids, got {str(document)[:60]!r}")
        ids = ids.long()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"embed: documents[{number}] must hold tokens of 0 to {vocabulary - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
        tokens.append(ids)
    return tokens


def _embed(
    model: Any,
    documents: list[Tensor],
    bins: Bins,
    first: int,
    pooling: str,
    normalize: bool,
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    result: Tensor | None = None
    for done, row in enumerate(bins):
        items = [item for item, _, _ in row]
        ids = torch.cat([documents[item] for item in items]).to(model.device)
        packing = Packing.from_lengths([length for _, _, length in row], device=model.device)
        positions = packing.position_ids[None] + first
        out = getattr(model(ids[None], position_ids=positions, packing=packing), "last_hidden_state", None)
        if out is None:
            raise TypeError(
                f"embed: model must return last_hidden_state, {type(model).__name__} does not; load it with AutoModel, or pass "
                "model.base_model"
            )
        out = out[0].float()
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
