"""PackedCollator: every tensor from the same boundaries. Weights: sums that are means, over any number of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import packattn
from packattn.data import PackedCollator, count_units, loss_weights


def test_batch() -> None:
    batch = PackedCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": []}, {"input_ids": [9, 10]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 10]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert "attention_mask" not in batch
    assert (batch["position_ids"].dtype, batch["seq_idx"].dtype, batch["cu_seq_lens_q"].dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )


@pytest.mark.parametrize("tail", ["own", "zeros", "drop"])
def test_tails(tail: str) -> None:
    batch = PackedCollator(pad_token_id=1, pad_to_multiple_of=4, tail=tail)(
        [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert batch["labels"][0, 5:].tolist() == [-100] * 3
    want = {
        "own": ([0, 1, 2, 0, 1, 0, 1, 2], [0, 3, 5, 8], [2, 2, 2]),
        "zeros": ([0, 1, 2, 0, 1, 0, 0, 0], [0, 3, 5, 6, 7, 8], [2, 3, 4]),
        "drop": ([0, 1, 2, 0, 1, 0, 1, 2], [0, 3, 5], [-1, -1, -1]),
    }[tail]
    assert batch["position_ids"][0].tolist() == want[0]
    assert batch["cu_seq_lens_q"].tolist() == want[1]
    assert batch["seq_idx"][0, 5:].tolist() == want[2]


def test_packed_rows_bins_masks_and_lengths() -> None:
    collator = PackedCollator(length=8)
    row = {"input_ids": torch.tensor([1, 2, 3, 4, 5]), "seq_lengths": [3, 2], "completion_mask": [0, 1, 1, 0, 1]}
    batch = collator([[row], [{"input_ids": [6], "labels": [7]}]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 8]
    assert batch["labels"][0].tolist() == [-100, 2, 3, -100, 5, -100, -100, -100]
    assert collator([])["input_ids"].shape == (1, 8)


@pytest.mark.parametrize(
    ("options", "examples", "message"),
    [
        ({"tail": "x"}, [], "tail must be one of own, zeros, drop"),
        ({"length": 0}, [], "length must be at least 1"),
        ({"length": 2}, [{"input_ids": [1, 2, 3]}], "at most length = 2 tokens, got 3"),
        ({}, [{"labels": [1]}], r"example 0 must have input_ids, got \['labels'\]"),
        ({}, [{"input_ids": [1, 2], "labels": [1]}], r"labels of example 0 must be as long as input_ids \(2\), got 1"),
        ({}, [{"input_ids": [1, 2], "seq_lengths": [1]}], "seq_lengths of example 0 must add up to its 2 tokens"),
        ({}, [{"input_ids": [[1, 2]]}], "must be a flat list of integers"),
        ({}, [{"input_ids": [1.5]}], "must be a flat list of integers"),
        ({}, [{"input_ids": "日本"}], "must be a flat list of integers"),
        ({}, [None], "examples must be mappings, or lists of them, got NoneType"),
        ({}, {"input_ids": [1]}, "wanted a list of examples, got one dict"),
        ({}, [{"input_ids": [1, 0], "attention_mask": [1, 0]}], "attention_mask of example 0 must be of ones"),
        ({}, [{"input_ids": [1, 2], "attention_mask": [1, 2]}], "attention_mask of example 0 must be of ones"),
        ({}, [{"input_ids": [1, 2], "seq_lengths": [3, -1]}], "seq_lengths of example 0 must add up"),
        ({"pad_token_id": None}, [], "pad_token_id must be an integer .*got NoneType"),
        ({"pad_to_multiple_of": 4.0}, [], "pad_to_multiple_of must be an integer, got float"),
    ],
)
def test_refusals(options: dict[str, Any], examples: list[Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PackedCollator(**options)(examples)


def test_positions_that_restart_are_boundaries() -> None:
    """Rows that others packed say where documents begin by their positions; without them they would be one document."""
    row = {
        "input_ids": [np.int64(n) for n in (1, 2, 3, 4, 5)],
        "position_ids": [0, 1, 2, 0, 1],
        "attention_mask": [1] * 5,
    }
    batch = PackedCollator()([row, {"input_ids": np.array([6], dtype=np.uint16), "position_ids": [0]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
    assert PackedCollator()([{**row, "seq_lengths": [4, 1]}])["cu_seq_lens_q"].tolist() == [0, 4, 5]


# ---- weights ---------------------------------------------------------------------------------------------------

# Documents of 4, 1, 3 and 2 tokens and 2 of padding; -100 is not trained.
LENGTHS = (4, 1, 3, 2)
LABELS = torch.tensor([9, 9, -100, 9, 9, 9, 9, 9, 9, -100, 9, 9])
PACKING = packattn.Packing.from_lengths(LENGTHS, total=12)


@pytest.mark.parametrize(
    ("average", "units"),
    [
        # the first label of every document crosses a boundary
        ("token", [[1], [3], [6], [7]]),
        ("document", [[1, 3], [6, 7]]),
        ("pair", [[1], [3], [6, 7]]),
    ],
)
@pytest.mark.parametrize("total", [None, 10])
def test_weights(average: Any, units: list[list[int]], total: int | None) -> None:
    want = torch.zeros(12)
    for unit in units:
        for t in unit:
            want[t] = 1 / len(unit) / (total or len(units))
    torch.testing.assert_close(loss_weights(LABELS, PACKING, average, total=total), want)
    assert int(count_units(LABELS, PACKING, average)) == len(units)
    torch.testing.assert_close(loss_weights(LABELS.view(2, 6), PACKING, average, total=total), want.view(2, 6))


def test_runs_do_not_go_over_a_boundary_when_labels_are_shifted() -> None:
    """Shifted labels lose the last of each document, so that two runs could only meet at a first token."""
    packing = packattn.Packing.from_lengths([2, 2])
    weights = loss_weights(torch.tensor([9, 9, 9, 9]), packing, "pair", shifted=True)
    assert weights.tolist() == [0.5, 0, 0.5, 0]


@pytest.mark.parametrize("average", ["token", "document", "pair"])
def test_accumulation_is_one_batch(average: Any) -> None:
    """Micro-batches of one document each, weighted with the total of all, sum to the mean over all of them."""
    loss = torch.rand(12)
    total = int(count_units(LABELS, PACKING, average))
    whole = (loss_weights(LABELS, PACKING, average) * loss).sum()
    parts = torch.tensor(0.0)
    for document in PACKING.documents():
        one = packattn.Packing.from_lengths([document.stop - document.start])
        parts += (loss_weights(LABELS[document], one, average, total=total) * loss[document]).sum()
    torch.testing.assert_close(parts, whole)


def test_nothing_trained() -> None:
    for labels, packing in (
        (torch.full((3,), -100), packattn.Packing.from_lengths([3])),
        (torch.zeros(0).long(), packattn.Packing.from_lengths([])),
    ):
        for average in ("token", "document", "pair"):
            assert loss_weights(labels, packing, average).sum() == 0
            assert count_units(labels, packing, average) == 0
    for total in (-1, torch.tensor(-1)):
        with pytest.raises(ValueError, match="total must not be negative"):
            loss_weights(LABELS, PACKING, total=total)
    with pytest.raises(ValueError, match="average must be one of token, document, pair"):
        loss_weights(LABELS, PACKING, "mean")
