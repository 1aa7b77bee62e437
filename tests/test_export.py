"""torch.export of a small packed model: the exported program gives the bits of the model."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import packattn
from packattn import Packing


class Block(nn.Module):
    """Attention with GQA, rotated by positions, and a projection."""

    def __init__(self, width: int = 32, heads: int = 4, heads_k: int = 2) -> None:
        super().__init__()
        self.heads, self.heads_k, self.dim = heads, heads_k, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * heads_k) * self.dim)
        self.out = nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split((self.heads, self.heads_k, self.heads_k), dim=1)
        angle = packing.position_ids[:, None, None] * 0.1
        q, k = q * torch.cos(angle), k * torch.cos(angle)
        attended = packattn.attention(q, k, v, packing, sinks=self.sinks, window_size=(20, 0))
        return x + self.out(attended.flatten(1))


class Model(nn.Module):
    """Tokens and what says where documents are -> logits."""

    def __init__(self, boundaries: str) -> None:
        super().__init__()
        self.boundaries = boundaries
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, where: Any) -> torch.Tensor:
        if self.boundaries == "position_ids":
            where = Packing.from_position_ids(where)
        elif self.boundaries == "segment_ids":
            where = Packing.from_segment_ids(where, pad_id=0)
        elif self.boundaries == "cu_seqlens":
            where = Packing.from_cu_seqlens(where, tokens.shape[-1])
        x = self.embed(tokens.flatten())
        for block in self.blocks:
            x = block(x, where)
        return self.head(x)


def where_of(boundaries: str, lengths: list[int]) -> Any:
    packing = Packing.from_lengths(lengths)
    return {
        "packing": packing,
        "position_ids": packing.position_ids[None],
        "segment_ids": packing.segment_ids[None] + 1,
        "cu_seqlens": packing.cu_seqlens,
    }[boundaries]


def tokens_of(lengths: list[int]) -> torch.Tensor:
    return torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))


BOUNDARIES = ("packing", "position_ids", "segment_ids", "cu_seqlens")
# The last has the number of documents in its shape, as cu_seqlens have.
SAME_COUNT = ("packing", "cu_seqlens")


@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_export(boundaries: str) -> None:
    torch.manual_seed(0)
    model = Model(boundaries).eval()
    first = [10, 3, 27]
    program = torch.export.export(model, (tokens_of(first), where_of(boundaries, first)))
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert any("packattn.attention_forward" in name for name in ops)
    others = [[5, 5, 30], [38, 1, 1]] + ([] if boundaries in SAME_COUNT else [[40], [1] * 40, [20, 20]])
    with torch.no_grad():
        for lengths in (first, *others):
            args = (tokens_of(lengths), where_of(boundaries, lengths))
            assert torch.equal(program.module()(*args), model(*args)), lengths


@pytest.mark.parametrize("boundaries", ("position_ids", "segment_ids"))
def test_export_with_dynamic_tokens(boundaries: str) -> None:
    torch.manual_seed(0)
    model = Model(boundaries).eval()
    first = [10, 3, 27]
    tokens = torch.export.Dim("tokens", min=4, max=4096)
    program = torch.export.export(
        model, (tokens_of(first), where_of(boundaries, first)), dynamic_shapes=({1: tokens}, {1: tokens})
    )
    with torch.no_grad():
        for lengths in (first, [100, 1], [7], [3] * 20):
            args = (tokens_of(lengths), where_of(boundaries, lengths))
            assert torch.equal(program.module()(*args), model(*args)), lengths


@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_saved_and_loaded(boundaries: str) -> None:
    torch.manual_seed(0)
    model = Model(boundaries).eval()
    args = (tokens_of([10, 3, 27]), where_of(boundaries, [10, 3, 27]))
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, args), buffer)
    buffer.seek(0)
    again = torch.export.load(buffer)
    with torch.no_grad():
        assert torch.equal(again.module()(*args), model(*args))


def test_exported_program_keeps_documents_apart() -> None:
    torch.manual_seed(0)
    model = Model("position_ids").eval()
    lengths = [17, 23]
    program = torch.export.export(model, (tokens_of(lengths), where_of("position_ids", lengths)))
    tokens = tokens_of(lengths)
    other = tokens.clone()
    other[0, :17] = (other[0, :17] + 7) % 50
    with torch.no_grad():
        a, b = (program.module()(t, where_of("position_ids", lengths)) for t in (tokens, other))
    assert torch.equal(a[17:], b[17:]) and not torch.equal(a[:17], b[:17])
