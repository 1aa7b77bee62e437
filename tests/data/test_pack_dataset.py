"""pack_dataset: TRL's rows and columns, nothing lost, and over the whole dataset."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from packattn.data import pack_dataset

EXAMPLES = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]],
    "attention_mask": [[1, 1, 1, 0, 0], [1, 0], [1, 1, 0], [1]],
}


def made(count: int = 300, longest: int = 50) -> Any:
    random = np.random.RandomState(0)
    ids = [[row] * int(n) for row, n in enumerate(random.randint(0, longest, count))]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": [[-x for x in row] for row in ids]})


def split(packed: Any, column: str) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row[column])
        start = 0
        for n in row["seq_lengths"]:
            found[tuple(row[column][start : start + n])] += 1
            start += n
    return found


@pytest.mark.parametrize(
    ("strategy", "rows", "lengths"),
    [
        ("bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]]),
        ("bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]]),
    ],
)
def test_documented_rows(strategy: Any, rows: list[list[int]], lengths: list[list[int]]) -> None:
    packed = pack_dataset(datasets.Dataset.from_dict(EXAMPLES), 4, strategy)
    assert packed["input_ids"][:] == rows
    assert packed["seq_lengths"][:] == lengths
    assert packed.column_names == ["input_ids", "attention_mask", "seq_lengths"]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("longest", [50, 200])
def test_columns_equal_trl(strategy: Any, longest: int) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    dataset = made(longest=longest)
    ours = pack_dataset(dataset, 64, strategy, {"batch_size": 7})
    theirs = trl.pack_dataset(dataset, 64, strategy, {"batch_size": len(dataset)})
    assert ours.column_names == theirs.column_names
    assert ours.features["seq_lengths"] == theirs.features["seq_lengths"]
    assert len(ours) == len(theirs)
    for column in ("input_ids", "labels"):
        assert split(ours, column) == split(theirs, column)


@pytest.mark.parametrize("strategy", ["ffd", "next_fit", "balanced"])
def test_other_strategies_lose_nothing(strategy: Any) -> None:
    dataset = made()
    packed = pack_dataset(dataset, 64, strategy, seed=1)
    for column in ("input_ids", "labels"):
        assert split(packed, column) == Counter(tuple(row) for row in dataset[column] if row)


def test_a_slice_of_a_dataset_and_a_format() -> None:
    dataset = made().select(range(100, 200)).with_format("torch")
    packed = pack_dataset(dataset, 64)
    assert packed.format["type"] == "torch"
    assert split(packed.with_format(None), "input_ids") == Counter(tuple(r) for r in made()["input_ids"][100:200] if r)


def test_lists_of_fixed_size_large_ones_and_strings() -> None:
    fixed = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"), length=2)})
    large = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))})
    for features in (fixed, large):
        packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}, features=features), 4)
        assert packed["input_ids"][:] == [[1, 2, 3, 4]] and packed["seq_lengths"][:] == [[2, 2]]
    packed = pack_dataset(datasets.Dataset.from_dict({"wörter": [["a", "日"], None, ["é"]]}), 4)
    assert packed[0] == {"wörter": ["a", "日", "é"], "seq_lengths": [2, 1]}


def test_no_rows() -> None:
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[], []]}), 64)
    assert len(packed) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="strategy must be one of bfd, .* got 'wrapped'"):
        pack_dataset(made(), 64, "wrapped")
    with pytest.raises(ValueError, match="column 'text' must hold lists, got string"):
        pack_dataset(datasets.Dataset.from_dict({"text": ["a"]}), 64)
    with pytest.raises(ValueError, match="in row 1 'a' has 2 and 'b' 1"):
        pack_dataset(datasets.Dataset.from_dict({"a": [[1], [1, 2]], "b": [[1], [1]]}), 64)
    with pytest.raises(ValueError, match="it is packed"):
        pack_dataset(pack_dataset(made(), 64), 64)
    with pytest.raises(ValueError, match="lengths"):
        pack_dataset(made(), 16, "ffd")
    with pytest.raises(TypeError, match="got DatasetDict"):
        pack_dataset(datasets.DatasetDict({"train": made()}), 64)
