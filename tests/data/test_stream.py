"""StreamPacker: every document once, for every number of ranks, and the same batches after a stop at any step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packattn
from packattn.data import StreamPacker


def documents(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [[number] * int(n) for number, n in enumerate(random.randint(0, longest + 1, count))]


class Stream:
    """A source that can only be iterated."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def names(bins: list[list[list[int]]]) -> list[int]:
    return [document[0] for one in bins for document in one if document]


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"keep_order": True}])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_document_once(kind: Any, options: dict[str, Any], ranks: int) -> None:
    docs = documents(500)
    epochs = []
    packers = [StreamPacker(kind(docs), 64, window=100, rank=r, world_size=ranks, **options) for r in range(ranks)]
    for _ in range(2):
        found = [list(packer) for packer in packers]
        assert len({len(bins) for bins in found}) == 1, "every rank takes the same number of steps"
        steps = [one for step in zip(*found, strict=True) for one in step]
        assert all(sum(map(len, one)) <= 64 for one in steps)
        assert sorted(names(steps)) == [i for i, d in enumerate(docs) if d]
        assert sum(len(one) for one in steps) == len(docs), "documents of no tokens come too"
        if options.get("keep_order"):
            assert names(steps) == sorted(names(steps))
        epochs.append(steps)
    assert (epochs[0] == epochs[1]) == ("seed" not in options or kind is Stream)
    tokens = sum(map(len, docs))
    assert tokens / (64 * len(steps)) > (0.7 if options.get("keep_order") else 0.93)


def test_steps_have_like_cost() -> None:
    docs = documents(2000)
    found = [list(StreamPacker(docs, 64, window=400, rank=r, world_size=4)) for r in range(4)]
    cost = np.array([[sum(len(d) ** 2 for d in one) for one in bins] for bins in found])
    assert (cost.max(0) / cost.mean(0))[:-1].mean() < 1.1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 16), max_size=60),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([{}, {"seed": 1}, {"keep_order": True}]),
    st.booleans(),
    st.data(),
)
def test_stop_and_go_on_anywhere(
    sizes: list[int], window: int, ranks: int, options: dict[str, Any], indexed: bool, data: st.DataObject
) -> None:
    docs = [[number] * n for number, n in enumerate(sizes)]
    source: Any = docs if indexed else Stream(docs)
    for rank in range(ranks):
        arguments = {"window": window, "rank": rank, "world_size": ranks, **options}
        whole = list(StreamPacker(source, 16, **arguments))
        stop = data.draw(st.integers(0, len(whole)))
        again = StreamPacker(source, 16, **arguments)
        iterator = iter(again)
        taken = [next(iterator) for _ in range(stop)]
        state = json.loads(json.dumps(again.state_dict()))
        later = StreamPacker(source, 16, **arguments)
        later.load_state_dict(state)
        assert taken + list(later) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 16), max_size=60),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([{}, {"seed": 1}, {"keep_order": True}]),
    st.booleans(),
)
def test_a_rank_has_nothing_only_where_nothing_is_left(
    sizes: list[int], window: int, ranks: int, options: dict[str, Any], drop_last: bool
) -> None:
    docs = [[number] * n for number, n in enumerate(sizes)]
    found = [
        list(StreamPacker(docs, 16, window=window, rank=r, world_size=ranks, drop_last=drop_last, **options))
        for r in range(ranks)
    ]
    assert len({len(bins) for bins in found}) == 1
    steps = list(zip(*found, strict=True))
    filled = [[sum(1 for d in one if d) for one in step] for step in steps]
    for counts in filled[:-1]:
        assert min(counts) > 0, "only the last step may have nothing for a rank"
    lost = sum(1 for d in docs if d) - sum(map(sum, filled))
    if drop_last:
        assert not any(one == [] for step in steps for one in step)
        assert 0 <= lost < ranks
        return
    assert lost == 0
    if filled and min(filled[-1]) == 0:  # no rank has a document to spare, nor had the step before
        assert max(filled[-1]) <= 1
        if "seed" not in options:  # which shuffles the steps before
            assert sum(map(sum, filled[-2:])) < 2 * ranks


def test_the_end_of_a_stream() -> None:
    """Five documents that fill a bin each, on four ranks; and ones of which two fit into a bin."""

    def steps(docs: list[list[int]], **options: Any) -> list[list[int]]:
        found = [list(StreamPacker(docs, 4, rank=r, world_size=4, **options)) for r in range(4)]
        return [[len(one) for one in step] for step in zip(*found, strict=True)]

    full = [[n] * 4 for n in range(5)]
    assert steps(full) == steps(full, keep_order=True) == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert steps(full, drop_last=True) == [[1, 1, 1, 1]]
    half = [[n] * 2 for n in range(9)]
    for options in ({}, {"keep_order": True}, {"drop_last": True}):
        assert sorted(sum(one) for one in zip(*steps(half, **options), strict=True)) == [2, 2, 2, 3]
        assert all(min(step) > 0 for step in steps(half, **options))
    assert steps([[1]]) == [[1, 0, 0, 0]]
    assert steps([]) == []


def test_a_rank_with_nothing_can_take_the_step() -> None:
    batch = packattn.PackedCollator(pad_token_id=7)([])
    assert batch["input_ids"].tolist() == [[7]] and batch["labels"].tolist() == [[-100]]
    packing = packattn.Packing.from_cu_seqlens(batch["cu_seq_lens_q"])
    assert packattn.loss_weights(batch["labels"], packing).sum() == 0


def test_workers() -> None:
    docs = documents(200)
    whole = list(StreamPacker(docs, 64, window=50))
    loader = torch.utils.data.DataLoader(StreamPacker(docs, 64, window=50), batch_size=None, num_workers=2)
    assert list(loader) == whole


def test_what_a_tokenizer_returns_is_measured_by_its_tokens() -> None:
    """It is a mapping, but no dict: its own length is that of its columns."""
    from collections import UserDict

    docs = [UserDict({"input_ids": [1] * n, "attention_mask": [1] * n}) for n in (3, 2, 4)]
    assert sorted(len(one) for one in StreamPacker(docs, 5)) == [1, 2]
    assert all(sum(len(d["input_ids"]) for d in one) <= 5 for one in StreamPacker(docs, 5))


def test_two_iterations_at_once_are_refused() -> None:
    packer = StreamPacker([[i] for i in range(6)], 1, window=2)
    first = iter(packer)
    next(first)
    second = iter(packer)
    assert next(second) == [[1]], "it goes on where the first stopped"
    with pytest.raises(RuntimeError, match="another iteration of this StreamPacker has begun"):
        next(first)
    assert list(second) == [[[2]], [[3]], [[4]], [[5]]]


def test_source_that_can_be_read_once() -> None:
    packer = StreamPacker(iter([[1], [2]]), 5)
    assert sorted(names(list(packer))) == [1, 2]
    with pytest.raises(ValueError, match="a list_iterator, which can be read once"):
        list(packer)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (({"train": [[1]]}, 4), {}, "one split of a DatasetDict.*got dict"),
        ((None, 4), {}, "must be an iterable of documents.*got NoneType"),
        (([], 4.0), {}, "capacity must be an integer, got float"),
        (([], 4), {"window": "1"}, "window must be an integer, got str"),
        (([], 4), {"seed": -1}, r"seed must be 0 to 2\*\*32 - 1, got -1"),
        (([], 4), {"seed": 1.5}, "seed must be an integer, got float"),
        (([], 4), {"rank": 0, "world_size": 0}, "world_size must be at least 1, got 0"),
        (([], 4), {"rank": "0", "world_size": 1}, "rank must be an integer, got str"),
        (([1], 4), {}, "documents must have a length .* got int"),
        (([{"text": "ä"}], 4), {}, r"documents must have input_ids .* got \['text'\]"),
    ],
    ids=str,
)
def test_wrong_types(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(StreamPacker(*arguments, **options))


@pytest.mark.parametrize("change", [{"next": -1}, {"next": 1.0}, {"carry": [5], "next": 2}, {"step": True}], ids=str)
def test_states_that_are_none(change: dict[str, Any]) -> None:
    packer = StreamPacker([[1]], 4)
    with pytest.raises(ValueError, match="its numbers do not fit"):
        packer.load_state_dict({**packer.state_dict(), **change})
    with pytest.raises(TypeError, match="got NoneType"):
        packer.load_state_dict(None)  # type: ignore[arg-type]
    packer.load_state_dict({**packer.state_dict(), "next": 50})
    with pytest.raises(ValueError, match="the source has 1 documents, but the state says that 50 were read"):
        list(packer)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at most capacity = 4 tokens, document 1 of the stream has 5"):
        list(StreamPacker([[1], [1] * 5], 4))
    with pytest.raises(ValueError, match="rank must be 0 to 1, got 2"):
        StreamPacker([], 4, rank=2, world_size=2)
    with pytest.raises(ValueError, match="must be given together"):
        StreamPacker([], 4, rank=0)
    with pytest.raises(ValueError, match="exclude each other"):
        StreamPacker([], 4, keep_order=True, seed=1)
    state = StreamPacker([], 4).state_dict()
    with pytest.raises(ValueError, match="taken with capacity = 4, this one has 5"):
        StreamPacker([], 5).load_state_dict(state)
    with pytest.raises(ValueError, match="must be of version 2, got 3"):
        StreamPacker([], 4).load_state_dict({**state, "version": 3})
    with pytest.raises(ValueError, match="it lacks carry, drop_last"):
        StreamPacker([], 4).load_state_dict({k: v for k, v in state.items() if k not in ("carry", "drop_last")})
    short = StreamPacker(Stream([[1]]), 4)
    short.load_state_dict({**state, "next": 3})
    with pytest.raises(ValueError, match="ended after 1 documents, but the state says that 3"):
        list(short)
