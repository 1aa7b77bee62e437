"""The metadata ops: conversions and ranges against loops over tokens, in the table, with capacity, int32 and int64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import BAD_CU_SEQLENS, CASES, POSITION_CASES, SEGMENT_CASES, Case, id_of, make_packing, spans
from helpers import cu_of_positions, mask, spans_of_ids

import packattn
from packattn import reference

ops = torch.ops.packattn
INTEGERS = (torch.int32, torch.int64)
INT64_MAX = 2**63 - 1
integer = pytest.mark.parametrize("dtype", INTEGERS, ids=id_of)
SMALL = [case for case in CASES if case.total_q * case.total_k <= 1200 * 1200 and not case.slow]


def rows_of(ids: list[Any]) -> list[list[int]]:
    return ids if ids and isinstance(ids[0], list) else [ids]


def assert_ints(got: torch.Tensor, expected: list[int], dtype: torch.dtype = torch.int32) -> None:
    assert got.dtype == dtype and got.tolist() == expected


# -------------------------------------------------------------------------------------------------- conversions


@integer
@pytest.mark.parametrize("name", POSITION_CASES)
def test_cu_seqlens_from_position_ids(name: str, dtype: torch.dtype) -> None:
    ids, keywords, expected = POSITION_CASES[name]
    got = packattn.cu_seqlens_from_position_ids(torch.tensor(ids, dtype=dtype), **keywords)
    assert_ints(got, expected)
    if "max_segments" not in keywords:
        assert cu_of_positions(rows_of(ids), keywords.get("rule", "step")) == expected, "the table and the loop differ"


@integer
@pytest.mark.parametrize("name", SEGMENT_CASES)
def test_cu_seqlens_from_segment_ids(name: str, dtype: torch.dtype) -> None:
    ids, keywords, expected, _ = SEGMENT_CASES[name]
    assert_ints(packattn.cu_seqlens_from_segment_ids(torch.tensor(ids, dtype=dtype), **keywords), expected)


@integer
@pytest.mark.parametrize("name", SEGMENT_CASES)
def test_documents_from_segment_ids(name: str, dtype: torch.dtype) -> None:
    ids, keywords, _, expected = SEGMENT_CASES[name]
    starts, ends = ops.documents_from_segment_ids(torch.tensor(ids, dtype=dtype), **keywords)
    assert_ints(starts, [a for a, _ in expected])
    assert_ints(ends, [b for _, b in expected])
    if "max_segments" not in keywords:
        assert spans_of_ids(rows_of(ids), keywords.get("pad_id")) == expected, "the table and the loop differ"


@integer
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], [0]),
        ([3, 4, 2], [0, 3, 7, 9]),
        ([0, 5, 0, 0, 7, 0], [0, 0, 5, 5, 5, 12, 12]),
        ([[3, 1, 0], [2, 0, 0]], [0, 3, 4, 4, 6, 6, 6]),
        ([2**31 - 1], [0, 2**31 - 1]),
    ],
)
def test_cu_seqlens_from_lengths(lengths: list[Any], expected: list[int], dtype: torch.dtype) -> None:
    assert_ints(packattn.cu_seqlens_from_lengths(torch.tensor(lengths, dtype=dtype)), expected)


def test_cu_seqlens_from_a_list_of_lengths() -> None:
    assert_ints(packattn.cu_seqlens_from_lengths([3, 0, 2]), [0, 3, 3, 5])
    assert_ints(packattn.cu_seqlens_from_lengths((1,)), [0, 1])


@integer
@pytest.mark.parametrize(
    ("cu", "total", "positions", "segments"),
    [
        ([0, 3, 5], 5, [0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([0, 0, 5, 5, 5, 7, 7], 7, [0, 1, 2, 3, 4, 0, 1], [1, 1, 1, 1, 1, 4, 4]),
        ([0, 3], 6, [0, 1, 2, 0, 1, 2], [0, 0, 0, -1, -1, -1]),
        ([0, 2, 2, 2], 4, [0, 1, 0, 1], [0, 0, -1, -1]),
        ([0], 2, [0, 1], [-1, -1]),
        ([0, 0], 2, [0, 1], [-1, -1]),
        ([0], 0, [], []),
    ],
)
def test_token_ids_from_cu_seqlens(
    cu: list[int], total: int, positions: list[int], segments: list[int], dtype: torch.dtype
) -> None:
    t = torch.tensor(cu, dtype=dtype)
    assert_ints(packattn.position_ids_from_cu_seqlens(t, total), positions, torch.int64)
    assert_ints(packattn.segment_ids_from_cu_seqlens(t, total), segments)


def test_capacity_too_small_is_refused() -> None:
    ids = torch.tensor([0, 1, 0, 0])
    for function in (packattn.cu_seqlens_from_position_ids, packattn.cu_seqlens_from_segment_ids):
        with pytest.raises((ValueError, RuntimeError), match="max_segments"):
            function(ids, max_segments=2)
    with pytest.raises((ValueError, RuntimeError), match="max_segments"):
        packattn.cu_seqlens_from_position_ids(ids, max_segments=-1)


def test_planes_of_mrope() -> None:
    ids = torch.arange(24).reshape(3, 1, 8)
    with pytest.raises((ValueError, RuntimeError), match="plane"):
        packattn.cu_seqlens_from_position_ids(ids)
    with pytest.raises((ValueError, RuntimeError), match="plane"):
        packattn.Packing.from_position_ids(ids)
    with pytest.raises((ValueError, RuntimeError), match="plane"):
        packattn.cu_seqlens_from_position_ids(ids, plane=3)
    with pytest.raises((ValueError, RuntimeError), match="plane"):
        packattn.cu_seqlens_from_position_ids(ids[0], plane=0)
    assert_ints(packattn.cu_seqlens_from_position_ids(ids, plane=0), [0, 8])


BAD_IDS = {
    "float": (torch.zeros(4), "int"),
    "bool": (torch.zeros(4, dtype=torch.bool), "int"),
    "int16": (torch.zeros(4, dtype=torch.int16), "int"),
    "scalar": (torch.tensor(3), "D"),
    "3d": (torch.zeros(2, 2, 2, dtype=torch.int64), "3-D"),
    "4d": (torch.zeros(1, 1, 2, 2, dtype=torch.int64), "D"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids(name: str) -> None:
    ids, words = BAD_IDS[name]
    for function in (packattn.cu_seqlens_from_position_ids, packattn.cu_seqlens_from_segment_ids):
        with pytest.raises((ValueError, RuntimeError), match=words):
            function(ids)


def test_bad_rule_and_bad_lengths() -> None:
    with pytest.raises((ValueError, RuntimeError), match="rule.*zero"):
        packattn.cu_seqlens_from_position_ids(torch.tensor([0, 1]), rule="reset")
    with pytest.raises((ValueError, RuntimeError), match="lengths.*-2"):
        packattn.cu_seqlens_from_lengths(torch.tensor([3, -2, 4]))
    with pytest.raises((ValueError, RuntimeError), match="lengths.*-2"):
        packattn.cu_seqlens_from_lengths([3, -2, 4])
    with pytest.raises((ValueError, RuntimeError), match="int32|2147483647"):
        packattn.cu_seqlens_from_lengths(torch.tensor([2**31 - 1, 1]))
    with pytest.raises((ValueError, RuntimeError), match="lengths.*float"):
        packattn.cu_seqlens_from_lengths(torch.tensor([3.0]))
    for lengths in ([1.5], [True], [[1, 2], [3]], "12", 3):
        with pytest.raises(TypeError, match="lengths"):
            packattn.cu_seqlens_from_lengths(lengths)
    with pytest.raises(ValueError, match="cu_seqlens must be a tensor, got list"):
        packattn.Packing.from_cu_seqlens([0, 3, 5])


@pytest.mark.parametrize("name", BAD_CU_SEQLENS)
def test_bad_cu_seqlens(name: str) -> None:
    cu, words = BAD_CU_SEQLENS[name]
    for function in (packattn.position_ids_from_cu_seqlens, packattn.segment_ids_from_cu_seqlens):
        with pytest.raises((ValueError, RuntimeError), match=words):
            function(cu, 6)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        packattn.Packing.from_cu_seqlens(cu, 6)
    q = torch.randn(6, 1, 8)
    with pytest.raises((ValueError, RuntimeError), match=words):
        ops.attention(q, q, q, cu)
    with pytest.raises((ValueError, RuntimeError), match=words):
        ops.attention(q, q, q, torch.tensor([0, 4, 6], dtype=torch.int32), cu)


def test_cu_seqlens_on_another_device() -> None:
    q = torch.randn(6, 1, 8)
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        ops.attention(q, q, q, torch.tensor([0, 4, 6], dtype=torch.int32, device="meta"))


def test_other_strides_of_ids() -> None:
    ids = torch.tensor([[0, 9, 1, 9, 0, 9], [0, 9, 0, 9, 1, 9]])
    assert_ints(packattn.cu_seqlens_from_position_ids(ids[:, ::2]), [0, 2, 3, 4, 6])
    assert_ints(packattn.cu_seqlens_from_position_ids(ids[:, ::2].t().contiguous().t()), [0, 2, 3, 4, 6])
    assert_ints(packattn.position_ids_from_cu_seqlens(torch.tensor([0, 8, 2, 8, 3])[::2], 3), [0, 1, 0], torch.int64)


# -------------------------------------------------------------------------------------------------------- ranges


def ranges_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.packing().key_ranges(case.packing_k(), **case.mask_options())


@pytest.mark.parametrize("case", SMALL, ids=id_of)
def test_key_ranges_are_the_mask(case: Case) -> None:
    begin, end = ranges_of(case)
    j = torch.arange(case.total_k)
    assert torch.equal((j >= begin[:, None]) & (j < end[:, None]), mask(case))
    assert torch.equal(packattn.dense_mask(case.packing(), case.packing_k(), **case.mask_options()), mask(case))


@pytest.mark.parametrize("case", SMALL, ids=id_of)
def test_key_ranges_do_not_decrease(case: Case) -> None:
    begin, end = ranges_of(case)
    some = begin < end
    assert begin.dtype == end.dtype == torch.int32 and begin.is_contiguous() and end.is_contiguous()
    assert bool((begin[some].diff() >= 0).all()) and bool((end[some].diff() >= 0).all())
    assert bool((begin >= 0).all()) and bool((begin <= end).all()) and bool((end <= case.total_k).all())


@pytest.mark.parametrize("case", SMALL, ids=id_of)
def test_query_ranges_are_the_transpose(case: Case) -> None:
    begin, end = ops.query_ranges(*ranges_of(case), case.total_k)
    expected = mask(case).t()
    assert begin.shape == end.shape == (case.total_k,)
    i = torch.arange(case.total_q)
    got = (i >= begin[:, None]) & (i < end[:, None])
    # Rows that see nothing may lie inside a range; no other row too many, none too few.
    some = expected.any(0)
    assert torch.equal(got[:, some], expected[:, some])
    for key in range(case.total_k):
        if not expected[key].any():
            assert begin[key] >= end[key]


@pytest.mark.parametrize("case", SMALL, ids=id_of)
def test_document_ranges(case: Case) -> None:
    p, other = case.packing(), case.packing_k() or case.packing()
    begin, end, diagonal, segment = ops.document_ranges(p.starts, p.ends, other.starts, other.ends, case.total_q)
    wanted = {}
    for n, d in enumerate(case.documents):
        for i in range(d.q_length):
            at = d.k_start + i + d.k_length - d.q_length
            wanted[d.q_start + i] = (d.k_start, d.k_start + d.k_length, at, n)
    for t in range(case.total_q):
        got = tuple(int(x[t]) for x in (begin, end, diagonal, segment))
        if t in wanted:
            assert got == wanted[t], t
        else:
            assert got[0] == got[1] == got[2] and got[3] == -1, t


@pytest.mark.parametrize("name", ("document_ranges", "key_ranges", "query_ranges"))
def test_compiled_and_reference_agree_on_anything(name: str, native: None) -> None:
    """Also on ranges that no packing makes."""
    rng = random.Random(0)

    def ints(n: int, low: int, high: int) -> torch.Tensor:
        return torch.tensor([rng.randint(low, high) for _ in range(n)], dtype=torch.int32)

    for _ in range(100):
        n = rng.randint(0, 12)
        if name == "document_ranges":
            cuts = [sorted(rng.randint(0, 20) for _ in range(2 * n)) for _ in range(2)]
            spans_ = [torch.tensor(c[i::2], dtype=torch.int32) for c in cuts for i in (0, 1)]
            args: tuple[Any, ...] = (*spans_, 20)
        elif name == "key_ranges":
            begin = ints(n, 0, 9)
            args = (begin, begin + ints(n, 0, 9)) + tuple(rng.choice((None, ints(n, -3, 20))) for _ in range(2))
            windows = (rng.choice((-1, 0, 1, 2, 3, 5, INT64_MAX)) for _ in range(2))
            args += (rng.random() < 0.5, *windows, rng.choice((0, 1, 2, 5, INT64_MAX)))
        else:
            begin = ints(n, 0, 9).sort().values
            args = (begin, (begin + ints(n, -1, 6)).cummax(0).values if n else begin, 20)
        got, expected = getattr(ops, name)(*args), getattr(reference, name)(*args)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), args


def test_bad_patterns() -> None:
    begin, end = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    for change, words in (
        ({0: begin.long()}, "begin"),
        ({1: end[:1]}, "end"),
        ({2: end[:1]}, "diagonal"),
        ({3: end.float()}, "prefix_end"),
        ({5: -2}, "window_left"),
        ({6: -5}, "window_right"),
        ({7: -1}, "chunk_size"),
    ):
        args: list[Any] = [begin, end, None, None, True, -1, -1, 0]
        for at, value in change.items():
            args[at] = value
        with pytest.raises((ValueError, RuntimeError), match=words):
            ops.key_ranges(*args)


def test_bad_documents() -> None:
    def call(starts_q: list[int], ends_q: list[int], starts_k: list[int], ends_k: list[int], total: int = 10) -> None:
        ops.document_ranges(*(torch.tensor(x, dtype=torch.int32) for x in (starts_q, ends_q, starts_k, ends_k)), total)

    call([0, 3], [3, 5], [0, 3], [3, 5])
    for bad in (
        ([0, 3], [3, 5], [0], [3]),
        ([0, 3], [3], [0, 3], [3, 5]),
        ([0, 2], [3, 5], [0, 3], [3, 5]),
        ([0, 3], [3, 11], [0, 3], [3, 5]),
        ([-1, 3], [3, 5], [0, 3], [3, 5]),
        ([3, 0], [5, 3], [0, 3], [3, 5]),
        ([0, 3], [3, 5], [0, 3], [3, 2]),
    ):
        with pytest.raises((ValueError, RuntimeError), match="document"):
            call(*bad)


def test_table_of_runs_is_what_it_says() -> None:
    """The numbers of cases.py themselves."""
    assert spans((3, -2, 0, 4)) == [(0, 3), (5, 0), (5, 4)]
    assert make_packing((0, 5, 0, 0, 7, 0)).cu_seqlens.tolist() == [0, 0, 5, 5, 5, 12, 12]
    assert make_packing((5, -3, 4, -2)).segment_ids.tolist() == [0] * 5 + [-1] * 3 + [1] * 4 + [-1] * 2
