"""prepare: padding at any place, contradictions, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, documents, positions, segments

import packattn

pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
LENGTHS = (5, 4)
# Two documents of 5 and 4 tokens with padding before, inside and behind them. -1: padding.
PLACES = [-1, 0, 1, -1, -1, 2, 3, 4, 5, -1, 6, 7, 8, -1]
REAL = torch.tensor([[place >= 0 for place in PLACES]])


def spread(values: torch.Tensor, padding: int) -> torch.Tensor:
    """[9] values at the places of their tokens, [1, 14]."""
    out = torch.full((1, len(PLACES)), padding, dtype=values.dtype)
    out[REAL] = values
    return out


@pytest.mark.parametrize("name", ["llama", "bert", "qwen3"])
@pytest.mark.parametrize(
    "way", ["mask and positions", "mask and running positions", "mask of ids", "seq_idx", "bool mask"]
)
def test_padding_inside_a_document_does_not_divide_it(hf: Any, name: str, way: str) -> None:
    docs = documents(LENGTHS)
    row = spread(torch.cat(docs), 0)
    ones, ids = REAL.long(), spread(segments(LENGTHS, 1).long(), 0)
    # As generate() counts: tokens only, and 1 where there is none.
    counted = spread(positions(LENGTHS), 1)
    ways: dict[str, dict[str, Any]] = {
        "mask and positions": {"attention_mask": ones, "position_ids": counted},
        "mask and running positions": {"attention_mask": ones, "position_ids": spread(positions(LENGTHS), 0)},
        "mask of ids": {"attention_mask": ids},
        "seq_idx": {"attention_mask": ones, "seq_idx": spread(segments(LENGTHS), 7)},
        "bool mask": {"attention_mask": REAL, "position_ids": counted},
    }
    model = FAMILIES[name].build()
    extra = {"use_cache": False} if FAMILIES[name].causal else {}
    with torch.no_grad():
        alone = torch.cat([model(d[None], **extra).logits[0] for d in docs])
        hf.prepare(model)
        packed = model(row, **ways[way], **extra).logits[REAL]
    torch.testing.assert_close(packed, alone, **TOLERANCE)


def test_plain_padded_batches_are_left_alone(hf: Any) -> None:
    model = FAMILIES["llama"].build()
    row, mask = torch.randint(3, 61, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 4] = 0
    with torch.no_grad():
        before = model(row, attention_mask=mask, use_cache=False).logits
        remove = hf.prepare(model)
        assert torch.equal(model(row, attention_mask=mask, use_cache=False).logits[mask.bool()], before[mask.bool()])
        remove()


def test_ids_for_every_row_of_a_batch(hf: Any) -> None:
    docs = documents(LENGTHS)
    model = FAMILIES["llama"].build()
    with torch.no_grad():
        alone = torch.cat([model(d[None], use_cache=False).logits[0] for d in docs])
        hf.prepare(model)
        packed = model(torch.cat(docs)[None].repeat(3, 1), seq_idx=segments(LENGTHS)[None], use_cache=False).logits
    for row in packed:
        torch.testing.assert_close(row, alone, **TOLERANCE)


def test_wrong_shapes_name_the_argument(hf: Any) -> None:
    model = FAMILIES["llama"].build()
    hf.prepare(model)
    row = torch.cat(documents(LENGTHS))[None]
    with pytest.raises(ValueError, match=r"prepare: segment ids must be \[1 or 1, 9\].*got int32 \[1, 7\]"):
        model(row, seq_idx=segments((3, 4))[None])
    with pytest.raises(ValueError, match=r"prepare: position_ids must be \[1 or 1, 9\]"):
        model(row, position_ids=torch.arange(8)[None])
    with pytest.raises(ValueError, match=r"prepare: packing must have the 9 tokens of input_ids \[1, 9\]"):
        model(row, packing=packattn.Packing.from_lengths([3, 4]))
    with pytest.raises(TypeError, match="packing must be a packattn.Packing, got list"):
        model(row, packing=[5, 4])
    with pytest.raises(TypeError, match="seq_idx must be a tensor, got list"):
        model(row, seq_idx=[[0, 0]])


def test_mask_of_ids_inside_a_compiled_model(hf: Any) -> None:
    """Values cannot be read there, so the ids cannot be told from a padding mask: an error, not one document."""
    torch._dynamo.reset()
    model = FAMILIES["llama"].build()
    hf.prepare(model)
    compiled = torch.compile(model.forward.__self__.__call__, backend="eager", fullgraph=True)
    row = torch.cat(documents(LENGTHS))[None]
    with torch.no_grad():
        compiled(row, attention_mask=torch.ones_like(row), use_cache=False)
        with pytest.raises(RuntimeError, match="numbers the documents cannot be told from padding"):
            compiled(row, attention_mask=segments(LENGTHS, 1)[None].long(), use_cache=False)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_numbers_that_are_not_whole_are_refused(hf: Any, name: str) -> None:
    """Rounded, two documents may have one number."""
    row = torch.cat(documents((5, 4)))[None]
    model = FAMILIES["llama"].build()
    with pytest.raises(ValueError, match="must be integers, got float32"):
        model(row, **{name: segments((5, 4))[None] * 0.5}, use_cache=False)
    hf.prepare(model)
    with pytest.raises(ValueError, match="prepare: .* must be integers, got float32"):
        model(row, **{name: segments((5, 4))[None] * 0.5}, use_cache=False)


def drawn(random: np.random.RandomState, batch: int, size: int) -> torch.Tensor:
    """Rows of documents numbered from 1, with runs of padding (0) at any place."""
    rows = []
    for _ in range(batch):
        row: list[int] = []
        number = 1
        while len(row) < size:
            length = min(int(random.choice([1, 1, 2, 3, 5, 8])), size - len(row))
            row += [0 if random.rand() < 0.2 else number] * length
            number += 1
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bert", "modernbert"])
def test_batches_of_every_kind(hf: Any, name: str) -> None:
    """Whatever tells the documents apart: each has the logits it has alone, by a model without packattn."""
    random = np.random.RandomState(0)
    model, oracle = FAMILIES[name].build(), FAMILIES[name].build("eager")
    hf.prepare(model)
    extra = {"use_cache": False} if FAMILIES[name].causal else {}
    compared = 0
    for _ in range(25):
        batch, size = int(random.choice([1, 1, 2, 3])), int(random.randint(6, 25))
        ids = drawn(random, batch, size)
        real, packing = ids > 0, packattn.Packing.from_segment_ids(ids, pad_id=0)
        places = packing.position_ids.view(batch, size)
        tokens = torch.from_numpy(random.randint(3, 61, (batch, size)))
        ways: list[dict[str, Any]] = [
            {"attention_mask": ids},
            {"attention_mask": real.long(), "position_ids": places},
            {"attention_mask": real, "position_ids": places},
            {"attention_mask": ids, "position_ids": places},
            {"attention_mask": real.long(), "seq_idx": ids.int()},
            {"cu_seq_lens_q": packing.cu_seqlens, "cu_seq_lens_k": packing.cu_seqlens},
            {"packing": packing},
        ]
        way = ways[random.randint(len(ways))]
        with torch.no_grad():
            packed = model(tokens, **way, **extra).logits.flatten(0, 1)
            for rows in packing.documents():
                alone = oracle(tokens.flatten()[None, rows], **extra).logits[0]
                torch.testing.assert_close(
                    packed[rows], alone, rtol=1e-3, atol=1e-4, msg=lambda m, w=way: f"{list(w)}: {m}"
                )
                compared += 1
    assert compared > 60
