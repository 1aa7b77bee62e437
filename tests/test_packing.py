"""Packing: every constructor, its properties, immutability, the pytree, moving, validation, dense_mask."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from cases import BAD_CU_SEQLENS, BY_NAME, CASES, POSITION_CASES, SEGMENT_CASES, Case, id_of, spans
from helpers import mask
from torch.utils import _pytree as pytree

import packattn
from packattn import Packing

FIELDS = ("cu_seqlens", "starts", "ends", "begin", "end", "segment_ids")
SMALL = [case for case in CASES if case.total_q <= 1200 and not case.slow]


def assert_packing(p: Packing, documents: list[tuple[int, int]], total: int) -> None:
    """All fields and properties of p for documents [first row, one past the last) in a stream of `total` tokens."""
    owner, position = [-1] * total, [0] * total
    run = 0
    for n, (a, b) in enumerate(documents):
        owner[a:b] = [n] * (b - a)
    for t in range(total):
        fresh = t == 0 or owner[t] != owner[t - 1] or owner[t] >= 0 and t == documents[owner[t]][0]
        run = 0 if fresh else run + 1
        position[t] = run
    assert p.total == total and p.num_documents == len(documents)
    assert p.starts.tolist() == [a for a, _ in documents] and p.ends.tolist() == [b for _, b in documents]
    assert p.lengths.tolist() == [b - a for a, b in documents]
    assert p.segment_ids.tolist() == owner
    assert p.is_padding.tolist() == [n < 0 for n in owner]
    assert p.position_ids.tolist() == position
    for t in range(total):
        begin, end = int(p.begin[t]), int(p.end[t])
        assert begin == end if owner[t] < 0 else (begin, end) == documents[owner[t]]
    for name in FIELDS:
        assert getattr(p, name).dtype == torch.int32
    assert p.position_ids.dtype == torch.int64 and p.is_padding.dtype == torch.bool
    assert p.documents() == [slice(a, b) for a, b in documents]
    assert set(p.cu_seqlens.tolist()) >= {a for a, b in documents if b > a} | {0}
    p.validate()


@pytest.mark.parametrize("case", SMALL, ids=id_of)
def test_packing_of_the_table(case: Case) -> None:
    documents = [(a, a + n) for a, n in spans(case.q)]
    assert_packing(case.packing(), documents, case.total_q)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=id_of)
@pytest.mark.parametrize("name", POSITION_CASES)
def test_from_position_ids(name: str, dtype: torch.dtype) -> None:
    ids, keywords, cu = POSITION_CASES[name]
    t = torch.tensor(ids, dtype=dtype)
    assert_packing(Packing.from_position_ids(t, **keywords), list(itertools.pairwise(cu)), t.numel())


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=id_of)
@pytest.mark.parametrize("name", SEGMENT_CASES)
def test_from_segment_ids(name: str, dtype: torch.dtype) -> None:
    ids, keywords, cu, documents = SEGMENT_CASES[name]
    t = torch.tensor(ids, dtype=dtype)
    p = Packing.from_segment_ids(t, **keywords)
    assert_packing(p, documents, t.numel())
    if "max_segments" not in keywords:
        assert p.cu_seqlens.tolist() == cu


def test_from_segment_ids_with_padding_and_capacity() -> None:
    """Room for documents leaves room for the runs of padding between them."""
    ids = torch.tensor([[1, 0, 1, 0, 2], [0, 3, 0, 0, 0]])
    p = Packing.from_segment_ids(ids, pad_id=0, max_segments=4)
    assert_packing(p, [(0, 1), (2, 3), (4, 5), (6, 7)], 10)
    assert_packing(
        Packing.from_segment_ids(ids, pad_id=0, max_segments=6), [*[(0, 1), (2, 3), (4, 5), (6, 7)], (7, 7), (7, 7)], 10
    )


def test_from_attention_mask() -> None:
    expected = [(0, 2), (4, 8), (9, 11)]
    rows = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]
    for dtype in (torch.bool, torch.int32, torch.int64):
        assert_packing(Packing.from_attention_mask(torch.tensor(rows, dtype=dtype)), expected, 12)
    ids = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
    assert_packing(Packing.from_attention_mask(ids), [(0, 2), (2, 5), (6, 7), (7, 8), (8, 10)], 12)
    for wrong in (torch.ones(2, 3), [1, 1], torch.ones(1, 1, 3, 3, dtype=torch.bool)):
        with pytest.raises((TypeError, ValueError), match="attention_mask"):
            Packing.from_attention_mask(wrong)


@pytest.mark.parametrize(
    "lengths",
    (
        [3, 0, 2],
        (3, 0, 2),
        torch.tensor([3, 0, 2]),
        torch.tensor([3, 0, 2], dtype=torch.int32),
        list(np.array([3, 0, 2])),
        np.array([3, 0, 2], dtype=np.uint64),
    ),
    ids=("list", "tuple", "int64", "int32", "numpy_integers", "numpy_uint64"),
)
def test_from_lengths(lengths: Any) -> None:
    assert_packing(Packing.from_lengths(lengths), [(0, 3), (3, 3), (3, 5)], 5)
    assert_packing(Packing.from_lengths(lengths, total=8), [(0, 3), (3, 3), (3, 5)], 8)


def test_from_lengths_of_an_iterator() -> None:
    """It can be read once only; looking at it before reading it made a packing of nothing."""
    assert_packing(Packing.from_lengths(n for n in [3, 0, 2]), [(0, 3), (3, 3), (3, 5)], 5)
    assert_packing(Packing.from_lengths(map(len, ("abc", "", "de"))), [(0, 3), (3, 3), (3, 5)], 5)


@pytest.mark.parametrize("length", (2**63, -(2**63) - 1, 2**100), ids=("2^63", "-2^63-1", "2^100"))
def test_lengths_beyond_64_bits(length: int) -> None:
    with pytest.raises(ValueError, match=f"lengths must be .* got {length}"):
        Packing.from_lengths([1, length])


def test_to_takes_devices_only() -> None:
    """Tensor.to(dtype) would make floats of the offsets."""
    p = Packing.from_lengths([3, 2])
    assert p.to(torch.device("cpu")).device == p.to("cpu").device
    for wrong in (torch.bfloat16, None):
        with pytest.raises(TypeError, match="device must be a device"):
            p.to(wrong)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=id_of)
def test_from_cu_seqlens(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 3, 5], dtype=dtype)
    assert_packing(Packing.from_cu_seqlens(cu), [(0, 3), (3, 3), (3, 5)], 5)
    assert_packing(Packing.from_cu_seqlens(cu, 9), [(0, 3), (3, 3), (3, 5)], 9)
    assert_packing(Packing.from_cu_seqlens(torch.tensor([0], dtype=dtype), 2), [], 2)


def test_the_callers_cu_seqlens_stay_the_callers() -> None:
    """A buffer of offsets that the caller fills anew must not change a packing made from it."""
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    p = Packing.from_cu_seqlens(cu, 5)
    cu[1] = 1
    assert_packing(p, [(0, 3), (3, 5)], 5)


def test_lengths_for_another_device_are_looked_at_here() -> None:
    """Nothing is read back from the device, and wrong values are refused before they get there."""
    p = Packing.from_lengths([3, 2], device="meta")
    assert p.total == 5 and p.num_documents == 2 and p.begin.device.type == "meta"
    with pytest.raises(ValueError, match="total = 4"):
        Packing.from_lengths([3, 2], total=4, device="meta")


def test_attention_reads_nothing_back() -> None:
    """Meta tensors have no values, so whoever looked at one would raise: what a GPU would have to be waited for."""
    p = Packing.from_lengths([3, 2], total=6).to("meta")
    q = torch.empty(6, 2, 8, device="meta", requires_grad=True)
    prefix = torch.empty(2, dtype=torch.int64, device="meta")
    for options in ({}, {"packing_k": p, "window_size": (2, 0)}, {"prefix_lengths": prefix}, {"chunk_size": 2}):
        out = packattn.attention(q, q, q, p, **options)
        out.sum().backward()
        assert out.shape == q.shape and q.grad.shape == q.shape
    ids = torch.empty(6, dtype=torch.int64, device="meta")
    for made in (Packing.from_segment_ids(ids, 0, max_segments=3), Packing.from_position_ids(ids, max_segments=3)):
        assert made.total == 6 and made.num_documents == 3 and made.position_ids.shape == (6,)


def test_constructors_agree() -> None:
    """The same two rows said in five ways."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    ids = torch.tensor([[7, 7, 7, 8, 8], [7, 9, 9, 9, 9]])
    packings = [
        Packing.from_lengths([3, 2, 1, 4]),
        Packing.from_cu_seqlens(torch.tensor([0, 3, 5, 6, 10])),
        Packing.from_position_ids(positions),
        Packing.from_segment_ids(ids),
        Packing.from_attention_mask(ids),
    ]
    for p in packings[1:]:
        for name in FIELDS:
            assert torch.equal(getattr(p, name), getattr(packings[0], name)), name


def test_position_ids_round_trip() -> None:
    for case in SMALL:
        if case.total_q and all(n >= 0 for n in case.q):
            p = case.packing()
            again = Packing.from_position_ids(p.position_ids)
            assert again.documents() == [d for d in p.documents() if d.start < d.stop], case.name
            assert torch.equal(again.position_ids, p.position_ids)


BAD = {
    "lengths_over_total": (lambda: Packing.from_lengths([3, 4], total=6), "total"),
    "lengths_negative": (lambda: Packing.from_lengths([3, -4]), "lengths"),
    "lengths_float": (lambda: Packing.from_lengths([3.5]), "lengths"),
    "total_negative": (lambda: Packing.from_lengths([], total=-1), "total"),
    "three_planes": (lambda: Packing.from_position_ids(torch.zeros(3, 1, 8, dtype=torch.int64)), "plane"),
    "position_ids_float": (lambda: Packing.from_position_ids(torch.zeros(8)), "position_ids"),
    "segment_ids_float": (lambda: Packing.from_segment_ids(torch.zeros(8)), "segment_ids"),
    "too_many": (lambda: Packing.from_segment_ids(torch.arange(8), max_segments=7), "max_segments"),
    "rule": (lambda: Packing.from_position_ids(torch.zeros(8, dtype=torch.int64), rule="zeros"), "rule"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    function, words = BAD[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        function()


@pytest.mark.parametrize("name", BAD_CU_SEQLENS)
def test_bad_cu_seqlens_without_total(name: str) -> None:
    cu, words = BAD_CU_SEQLENS[name]
    if name == "past_the_end":
        pytest.skip("without a total there is no end")
    with pytest.raises((ValueError, TypeError), match=words):
        Packing.from_cu_seqlens(cu)


def test_three_planes_with_a_choice() -> None:
    ids = torch.stack([torch.tensor([[0, 1, 2, 0, 1]]), torch.zeros(1, 5, dtype=torch.int64)])
    assert_packing(Packing.from_position_ids(ids, plane=0), [(0, 3), (3, 5)], 5)
    assert Packing.from_position_ids(ids, plane=1).num_documents == 5
    assert Packing.from_position_ids(ids, plane=-2).num_documents == 2


# ------------------------------------------------------------------------------------------- immutable, a pytree


def test_immutable() -> None:
    p = Packing.from_lengths([3, 2])
    for name in (*FIELDS, "total", "lengths", "anything"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(p, name, None)


def test_pytree() -> None:
    p = Packing.from_lengths([3, 2], total=6)
    leaves, spec = pytree.tree_flatten(p)
    assert len(leaves) == len(FIELDS) and all(isinstance(t, torch.Tensor) for t in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, Packing) and all(getattr(again, n) is getattr(p, n) for n in FIELDS)
    moved = pytree.tree_map(lambda t: t + 0, {"packing": p, "x": [p]})
    assert_packing(moved["packing"], [(0, 3), (3, 5)], 6)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(p)[0]]
    assert keys == [f".{name}" for name in FIELDS]
    spec_again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert spec_again == spec


def test_copies() -> None:
    p = Packing.from_lengths([3, 2], total=6)
    for again in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert_packing(again, [(0, 3), (3, 5)], 6)


def test_to() -> None:
    p = Packing.from_lengths([3, 2], total=6)
    meta = p.to("meta")
    assert isinstance(meta, Packing) and all(getattr(meta, n).device.type == "meta" for n in FIELDS)
    assert meta.total == 6 and meta.num_documents == 2 and meta.position_ids.shape == (6,)
    assert_packing(p.to("cpu"), [(0, 3), (3, 5)], 6)
    assert_packing(p.to(torch.device("cpu")), [(0, 3), (3, 5)], 6)
    assert Packing.from_lengths([3, 2], device="cpu").begin.device.type == "cpu"


def test_repr_says_what_it_holds() -> None:
    assert repr(Packing.from_lengths([3, 2], total=6)) == (
        "Packing(2 documents, 6 tokens, 1 of them padding; lengths 3, 2)"
    )
    assert repr(Packing.from_lengths([1])) == "Packing(1 document, 1 token; lengths 1)"
    assert repr(Packing.from_lengths([])) == "Packing(0 documents, 0 tokens)"
    many = repr(Packing.from_lengths([1] * 999 + [7]))
    assert many == "Packing(1000 documents, 1006 tokens; lengths 1, 1, 1, 1, 1, 1, 1, 1, ... (longest 7))"
    assert repr(Packing.from_lengths([3]).to("meta")) == "Packing(<traced>)"


def html_of(packing: Packing) -> tuple[str, list[ElementTree.Element]]:
    """The text of the notebook's table and the rectangles over the grey one; the markup must be well-formed."""
    markup = packing._repr_html_()
    assert markup is not None and len(markup) < 40_000
    root = ElementTree.fromstring(markup)
    rectangles = [e for e in root.iter() if e.tag.endswith("rect")]
    return " ".join(root.itertext()), rectangles[1:]


def test_notebook_shows_every_document() -> None:
    text, found = html_of(Packing.from_segment_ids(torch.tensor([0, 1, 1, 0, 2, 2, 2, 2, 0, 0]), pad_id=0))
    for word in (
        "documents",
        "2",
        "10",
        "4 (40.0%)",
        "3.0",
        "document 0: 2 tokens, from 1",
        "document 1: 4 tokens, from 4",
    ):
        assert word in text, word
    assert [(float(r.get("x")), float(r.get("width"))) for r in found] == [(72.0, 143.0), (288.0, 287.0)]
    assert found[0].get("fill") != found[1].get("fill")


def test_notebook_of_many_of_none_and_of_traced() -> None:
    text, found = html_of(Packing.from_lengths([1, 2, 0, 3] * 5000, total=31_000))
    assert "20,000 (5,000 empty)" in text and "31,000" in text and "1,000 (3.2%)" in text
    assert len(found) == 240 - 8, "columns of padding stay grey"
    assert html_of(Packing.from_lengths([]))[1] == []
    assert html_of(Packing.from_lengths([0, 0]))[1] == []
    assert len(html_of(Packing.from_lengths([1] * 160))[1]) == 160
    assert Packing.from_lengths([3]).to("meta")._repr_html_() is None


@pytest.mark.parametrize("name", FIELDS)
def test_validate_finds_a_wrong_field(name: str) -> None:
    p = Packing.from_lengths([3, 2, 4], total=10)
    p.validate()
    wrong = getattr(p, name).clone()
    wrong[1] += 50
    with pytest.raises(ValueError):
        dataclasses.replace(p, **{name: wrong}).validate()


@pytest.mark.parametrize("cu", ([0, 3, 9], [0, 1, 3, 5, 9], [0, 3, 5], [0, 4, 5, 9], [0, 3, 5, 10]), ids=str)
def test_validate_finds_offsets_of_other_documents(cu: list[int]) -> None:
    """Sound offsets by themselves, but not those of the documents."""
    p = Packing.from_lengths([3, 2, 4], total=10)
    with pytest.raises(ValueError, match="cu_seqlens"):
        dataclasses.replace(p, cu_seqlens=torch.tensor(cu, dtype=torch.int32)).validate()


def test_validate_finds_a_wrong_size() -> None:
    p = Packing.from_lengths([3, 2, 4], total=10)
    with pytest.raises(ValueError, match=r"end must be \[total\] = \[10\]"):
        dataclasses.replace(p, end=p.end[:-1]).validate()


# ------------------------------------------------------------------------------------------------- masks to look at


def test_key_ranges_default_is_causal() -> None:
    begin, end = Packing.from_lengths([2, 3], total=6).key_ranges()
    assert begin[:5].tolist() == [0, 0, 2, 2, 2] and end[:5].tolist() == [1, 2, 3, 4, 5] and begin[5] >= end[5]


def test_dense_mask_by_hand() -> None:
    p = Packing.from_lengths([2, 3], total=6)
    causal = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0] * 6,
    ]
    got = packattn.dense_mask(p)
    assert got.dtype == torch.bool and got.int().tolist() == causal
    both = packattn.dense_mask(p, causal=False)
    assert both.int().tolist() == [[1, 1, 0, 0, 0, 0]] * 2 + [[0, 0, 1, 1, 1, 0]] * 3 + [[0] * 6]


def test_dense_mask_wants_a_packing() -> None:
    with pytest.raises(TypeError, match="dense_mask: packing must be a packattn.Packing"):
        packattn.dense_mask(torch.tensor([0, 3]))


def test_packing_k_of_itself_is_the_same_mask() -> None:
    for case in SMALL:
        if case.k is None:
            p = case.packing()
            options = case.mask_options()
            for a, b in zip(p.key_ranges(**options), p.key_ranges(case.packing(), **options), strict=True):
                assert torch.equal(a, b), case.name
            assert torch.equal(packattn.dense_mask(p, p, **options), mask(case))


def test_prefix_lengths_by_hand() -> None:
    p = Packing.from_lengths([4, 3])
    got = packattn.dense_mask(p, prefix_lengths=torch.tensor([3, 0])).int().tolist()
    assert got[:4] == [[1, 1, 1, 0, 0, 0, 0]] * 3 + [[1, 1, 1, 1, 0, 0, 0]]
    assert got[4:] == [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]
    assert BY_NAME["prefix"].prefix is not None
