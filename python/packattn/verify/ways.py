"""The ways in which people call a transformers model with packed rows, and what to write where one of them fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..packing import Packing

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of calling a model with packed rows.

    Attributes:
        name: of the way, as in the report.
        arguments: ``arguments(packing, shape)`` gives the keyword arguments, for a packing over [B, S] = shape.
        remedy: what to write instead where this way fails.
        rows: packed rows in the batch.
        tail: tokens of padding at the end of each row.
    """

    name: str
    arguments: Callable[[Packing, tuple[int, int]], Arguments]
    remedy: str
    rows: int = 1
    tail: int = 0


def _positions(packing: Packing, shape: tuple[int, int]) -> Tensor:
    return packing.position_ids.view(shape)


def _ids(packing: Packing, shape: tuple[int, int]) -> Tensor:
    return packing.segment_ids.view(shape).long() + 1


def _cu(packing: Packing) -> Arguments:
    longest = int(packing.lengths.max())
    cu = packing.cu_seqlens
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


NO_CACHE: Arguments = {"use_cache": False}
PACKATTN = (
    "no way of calling keeps this model's documents apart here; "
    'packattn.integrations.transformers.register(); model.set_attn_implementation("packattn"); '
    "packattn.integrations.transformers.prepare(model)"
)
OTHER_LAYERS = (
    "layers other than attention mix the documents (linear attention and convolutions need seq_idx and cu_seq_lens, and "
    "often a package that takes them); if there are none, please report this"
)
OTHER_POSITIONS = (
    "nothing leaks, but the logits are not those of the documents alone: rounding, if the relative difference is small; else "
    "the model does not take position_ids, or counts them over the row; then give each document a row of its own"
)
_SAY = "model(input_ids, position_ids=position_ids, use_cache=False) and no attention_mask"

WAYS = (
    Way(
        "position_ids, no cache",
        lambda p, s: {"position_ids": _positions(p, s), **NO_CACHE},
        PACKATTN,
    ),
    Way(
        "position_ids, default cache",
        lambda p, s: {"position_ids": _positions(p, s)},
        f"the cache switches the detection of packed rows off; {_SAY}",
    ),
    Way(
        "position_ids, all-ones mask",
        lambda p, s: {
            "position_ids": _positions(p, s),
            "attention_mask": torch.ones(s, dtype=torch.int64, device=p.device),
            **NO_CACHE,
        },
        f"the mask says that a row is one document; {_SAY}",
    ),
    Way(
        "position_ids, mask of ids",
        lambda p, s: {"position_ids": _positions(p, s), "attention_mask": _ids(p, s), **NO_CACHE},
        f"transformers makes ones of the ids; {_SAY}",
    ),
    Way(
        "mask of ids alone",
        lambda p, s: {"attention_mask": _ids(p, s), **NO_CACHE},
        f"transformers makes ones of the ids and positions run on; {_SAY}",
    ),
    Way(
        "cu_seq_lens alone",
        lambda p, s: {**_cu(p), **NO_CACHE},
        f"cu_seq_lens are for flash attention and ignored here; {_SAY}",
    ),
    Way(
        "seq_idx alone",
        lambda p, s: {"seq_idx": p.segment_ids.view(s), **NO_CACHE},
        f"seq_idx is for linear attention and ignored here; {_SAY}",
    ),
    Way(
        "position_ids and cu_seq_lens",
        lambda p, s: {"position_ids": _positions(p, s), **_cu(p), **NO_CACHE},
        PACKATTN,
    ),
    Way(
        "two packed rows",
        lambda p, s: {"position_ids": _positions(p, s), **NO_CACHE},
        "one packed row per batch",
        rows=2,
    ),
    Way(
        "padded tail",
        lambda p, s: {"position_ids": torch.where(p.is_padding, 0, p.position_ids).view(s), **NO_CACHE},
        "leave the padding off the end of the row",
        tail=3,
    ),
)
