"""packattn.pack: every token exactly once, no bin too full, the same result always, and refusals that say what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packattn import packer
from packattn.packer import Bins, pack

ALGORITHMS = ("bfd", "bfd_split", "ffd", "next_fit", "balanced")
MODES = [(a, o) for a in ALGORITHMS for o in ("error", "truncate", "split") if a != "bfd_split" or o == "split"]
needs_native = pytest.mark.skipif(packer.extension is None, reason="the native module is not built")


def rows(bins: Bins, documents: list[list[int]]) -> list[list[int]]:
    return [[t for item, start, length in b for t in documents[item][start : start + length]] for b in bins]


def assert_nothing_lost(bins: Bins, lengths: list[int], capacity: int, overflow: str) -> None:
    """Every token of every document is in exactly one bin, except those counted as truncated."""
    seen: dict[int, list[int]] = {item: [] for item in range(len(lengths))}
    for item, start, length in zip(bins.items.tolist(), bins.starts.tolist(), bins.lengths.tolist(), strict=True):
        seen[item] += range(start, start + length)
    kept = [min(n, capacity) if overflow == "truncate" else n for n in lengths]
    assert {item: sorted(tokens) for item, tokens in seen.items()} == {i: list(range(n)) for i, n in enumerate(kept)}
    assert bins.truncated_tokens == sum(lengths) - sum(kept)
    fragments = np.bincount(bins.items, minlength=len(lengths)).tolist()
    assert fragments == [max(1, -(-n // capacity)) if overflow == "split" else 1 for n in lengths]
    assert bins.offsets[0] == 0 and bins.offsets[-1] == len(bins.items)
    assert (np.diff(bins.offsets) >= 0).all()
    assert (bins.tokens <= capacity).all() and bins.tokens.sum() == sum(kept)


# ---- inputs from public reports (the documentation of TRL, and issues of it) -----------------------------------------

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]


def test_best_fit_with_truncation():
    bins = pack([5, 2, 3, 1], 4, "bfd", overflow="truncate")
    assert rows(bins, DOCUMENTS) == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
    assert [[length for _, _, length in b] for b in bins] == [[4], [3, 1], [2]]
    assert bins.truncated_tokens == 1


def test_best_fit_with_splitting():
    bins = pack([5, 2, 3, 1], 4, "bfd_split")
    assert rows(bins, DOCUMENTS) == [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]]
    assert [[length for _, _, length in b] for b in bins] == [[4], [3, 1], [2, 1]]
    assert bins.truncated_tokens == 0


@pytest.mark.parametrize("capacity", [8192, 8193, 16385, 2**20, 2**31])
def test_any_capacity_packs_as_well(capacity):
    lengths = np.random.RandomState(0).randint(1, 8192, size=3000)
    bins = pack(lengths, capacity)
    assert bins.num_bins <= 1.01 * lengths.sum() / capacity + 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_lengths_no_bins(algorithm):
    bins = pack([], 8, algorithm)
    assert (bins.num_bins, list(bins), bins.offsets.tolist(), bins.fill, len(bins.costs)) == (0, [], [0], 1.0, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_documents_without_tokens_cost_nothing_and_are_kept(algorithm):
    bins = pack([0, 4, 0, 4, 0], 4, algorithm)
    assert bins.num_bins == 2
    assert sorted(bins.items.tolist()) == [0, 1, 2, 3, 4]
    assert pack([0, 0], 4, algorithm).num_bins == 1


def test_documents_without_tokens_stay_in_place_where_order_counts():
    assert pack([0, 4, 0, 3], 4, "next_fit").items.tolist() == [0, 1, 2, 3]
    assert [[item for item, _, _ in b] for b in pack([0, 3, 0, 4], 4, "ffd")] == [[3], [1, 0, 2]]


# ---- what each algorithm promises ------------------------------------------------------------------------------------


def test_next_fit_keeps_the_order():
    assert [[item for item, _, _ in b] for b in pack([3, 3, 1, 2, 4], 4, "next_fit")] == [[0], [1, 2], [3], [4]]


def test_first_fit_takes_the_oldest_bin_and_best_fit_the_fullest():
    lengths = [6, 5, 5, 4, 3, 1]  # after 6, 5 + 5 and 4 + 3: room for 4, 0 and 3
    assert [[item for item, _, _ in b] for b in pack([6, 7, 2], 10, "ffd")] == [[1, 2], [0]]
    assert [[item for item, _, _ in b] for b in pack(lengths, 10, "ffd")] == [[0, 3], [1, 2], [4, 5]]
    assert [[item for item, _, _ in b] for b in pack([5, 6, 3], 10, "bfd")] == [[1, 2], [0]]
    assert [[item for item, _, _ in b] for b in pack([7, 6, 3, 3, 1], 10, "bfd")] == [[0, 2], [1, 3, 4]]


def test_balanced_evens_out_the_attention_cost():
    lengths = np.clip(np.random.RandomState(1).lognormal(6.0, 0.9, 2000), 8, 4096).astype(np.int64)
    # Room to spare in 1.25 times the bins that would do: the costs should then differ little.
    bins = pack(np.minimum(lengths, 1024), 4096, "balanced", num_bins=250)
    assert bins.num_bins == 250 and bins.costs.max() < 1.02 * bins.costs.mean()
    tight = pack(lengths, 4096, "balanced")
    assert tight.costs.std() < 0.9 * pack(lengths, 4096, "bfd").costs.std()
    assert tight.num_bins <= pack(lengths, 4096, "bfd").num_bins + 2


def test_balanced_fills_the_bins_asked_for():
    assert pack([3, 3], 4, "balanced", num_bins=4).tokens.tolist() == [3, 3, 0, 0]
    assert pack([], 4, "balanced", num_bins=2).num_bins == 2
    with pytest.raises(ValueError, match="num_bins: expected enough bins.*takes 2, got 1"):
        pack([3, 3], 4, "balanced", num_bins=1)


def test_a_seed_shuffles_reproducibly():
    lengths = np.random.RandomState(2).randint(1, 50, size=200).tolist()
    for algorithm in ALGORITHMS:
        one, same, other = (pack(lengths, 64, algorithm, seed=s) for s in (7, 7, 8))
        assert one.items.tolist() == same.items.tolist() != other.items.tolist()
        assert_nothing_lost(one, lengths, 64, "error")
    # Numbers that no version or machine may change: resuming a run needs the same bins again.
    assert list(pack([3, 1, 2, 4], 4, seed=0)) == [[(3, 0, 4)], [(2, 0, 2)], [(0, 0, 3), (1, 0, 1)]]


def test_bins_are_arrays_that_nobody_changes():
    bins = pack(torch.tensor([5, 2, 3, 1], dtype=torch.int32), 4, "bfd_split")
    assert bins.offsets.tolist() == [0, 1, 3, 5] and bins.bin_of.tolist() == [0, 1, 1, 2, 2]
    assert bins.starts.tolist() == [0, 0, 4, 0, 0] and bins.costs.tolist() == [16, 10, 5]
    assert len(bins) == 3 and bins[-1] == [(1, 0, 2), (3, 0, 1)] and bins.fill == 11 / 12
    assert repr(bins) == "Bins(num_bins=3, fragments=5, capacity=4, fill=0.9167, truncated_tokens=0)"
    with pytest.raises(ValueError, match="read-only"):
        bins.items[0] = 1
    with pytest.raises(AttributeError):
        bins.capacity = 5
    with pytest.raises(IndexError):
        bins[3]


def test_the_callers_lengths_stay_the_callers():
    lengths = np.array([3, 1])
    pack(lengths, 4)
    lengths[0] = 2  # still writable


# ---- properties ------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 70), max_size=60),
    capacity=st.integers(1, 80),
    mode=st.sampled_from(MODES),
    seed=st.none() | st.integers(0, 2**32 - 1),
)
def test_every_token_once_and_no_bin_too_full(lengths, capacity, mode, seed):
    algorithm, overflow = mode
    if overflow == "error":
        lengths = [n for n in lengths if n <= capacity]
    bins = pack(lengths, capacity, algorithm, overflow=overflow, seed=seed)
    assert_nothing_lost(bins, lengths, capacity, overflow)
    again = pack(np.array(lengths, dtype=np.int32), capacity, algorithm, overflow=overflow, seed=seed)
    assert all((getattr(bins, a) == getattr(again, a)).all() for a in ("items", "starts", "lengths", "offsets"))
    if algorithm != "balanced" and len(lengths) > 0:
        assert bins.num_bins <= 2 * bins.lengths.sum() / capacity + 1


@needs_native
@given(
    lengths=st.lists(st.integers(0, 200), max_size=80),
    scale=st.sampled_from([1, 1, 1000, 2**23]),
    slack=st.integers(0, 200),
    algorithm=st.sampled_from(["bfd", "ffd", "next_fit", "balanced"]),
    num_bins=st.integers(1, 30),
)
def test_native_and_python_agree(lengths, scale, slack, algorithm, num_bins):
    sizes = np.array(lengths, dtype=np.int64) * scale
    capacity = min(max([1, *sizes.tolist()]) + slack * scale, 2**31)
    native = packer.extension.pack(sizes, capacity, algorithm, num_bins)
    python = packer._pack_slowly(sizes, capacity, algorithm, num_bins)
    assert [a.tolist() for a in native] == [a.tolist() for a in python]


@needs_native
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_native_and_python_agree_on_many(algorithm, monkeypatch):
    lengths = np.clip(np.random.RandomState(3).lognormal(6.0, 0.9, 20_000), 8, 4096).astype(np.int64)
    native = pack(lengths, 4096, algorithm, seed=1)
    monkeypatch.setattr(packer, "extension", None)
    python = pack(lengths, 4096, algorithm, seed=1)
    assert all((getattr(native, a) == getattr(python, a)).all() for a in ("items", "starts", "lengths", "offsets"))
    assert algorithm == "next_fit" or native.fill > 0.998


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(lengths=[3, 9, 5], capacity=4), ValueError, r"lengths: expected at most capacity \(4\).*got 2 longer ones.*9 at index 1"),
        (dict(lengths=[3, -1], capacity=4), ValueError, "lengths: expected 0 or more, got -1 at index 1"),
        (dict(lengths=np.array([1, 2**63], dtype=np.uint64), capacity=4), ValueError, r"lengths: expected fewer than 2\*\*62 tokens"),
        (dict(lengths=[2**61, 2**61], capacity=4, overflow="truncate"), ValueError, f"lengths: .*together, got {2**62}"),
        (dict(lengths=[[1, 2]], capacity=4), ValueError, r"lengths: expected one dimension, got shape \[1, 2\]"),
        (dict(lengths=[[1, 2], [3]], capacity=4), ValueError, "lengths: expected one dimension"),
        (dict(lengths=[1.0], capacity=4), TypeError, "lengths: expected integers, got float64"),
        (dict(lengths=[True], capacity=4), TypeError, "lengths: expected integers, got bool"),
        (dict(lengths=torch.ones(2, dtype=torch.bfloat16), capacity=4), TypeError, "expected integers, got torch.bfloat16"),
        (dict(lengths=[1], capacity=0), ValueError, "capacity: expected 1 to 2147483648, got 0"),
        (dict(lengths=[1], capacity=2**31 + 1), ValueError, "capacity: expected 1 to 2147483648, got 2147483649"),
        (dict(lengths=[1], capacity=4.0), TypeError, "capacity: expected an integer, got float"),
        (dict(lengths=[1], capacity=4, algorithm="best"), ValueError, "algorithm: expected one of bfd, bfd_split.*got 'best'"),
        (dict(lengths=[1], capacity=4, overflow="drop"), ValueError, "overflow: expected one of error, truncate, split, got 'drop'"),
        (dict(lengths=[1], capacity=4, algorithm="bfd_split", overflow="error"), ValueError, "overflow: .*bfd_split.*got 'error'"),
        (dict(lengths=[1], capacity=4, num_bins=3), ValueError, 'num_bins: expected None unless algorithm is "balanced", got 3'),
        (dict(lengths=[1], capacity=4, algorithm="balanced", num_bins=0), ValueError, "num_bins: expected 1 to .*, got 0"),
        (dict(lengths=[1], capacity=4, algorithm="balanced", num_bins=2**31), ValueError, "num_bins: expected 1 to 67108864, got"),
        (dict(lengths=[1], capacity=4, seed=-1), ValueError, "seed: expected 0 to 4294967295, got -1"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        pack(**arguments)


@needs_native
@pytest.mark.parametrize(
    "arguments", [([5], 4, "bfd", 1), ([-1], 4, "ffd", 1), ([1], 0, "bfd", 1), ([1], 4, "best", 1), ([1], 4, "bfd", 0), ([[1]], 4, "bfd", 1)]
)  # fmt: skip
def test_the_native_function_is_safe_by_itself(arguments):
    with pytest.raises(ValueError):
        packer.extension.pack(np.array(arguments[0], dtype=np.int64), *arguments[1:])
