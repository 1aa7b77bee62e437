"""The table: every shape, mask and boundary the test suites draw on, by name.

A run of tokens is written as one number: ``n > 0`` is a document of n tokens, ``0`` a document without tokens, ``-n`` a
run of n padding tokens that belong to no document. So ``(3, -2, 4)`` is a stream of 9 tokens with two documents.

Nothing here computes anything with packattn except ``Case.packing`` and ``Case.packing_k``: what the right result is
stands in helpers.py, worked out from the runs alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

import packattn

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KERNEL_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class Document:
    """Rows [q_start, q_start + q_length) attend inside keys [k_start, k_start + k_length)."""

    q_start: int
    q_length: int
    k_start: int
    k_length: int
    prefix: int | None


@dataclass(frozen=True)
class Case:
    name: str
    q: tuple[int, ...]  # runs of the query stream
    k: tuple[int, ...] | None = None  # runs of the key stream; None: the same stream
    heads: tuple[int, int] = (2, 2)  # Hq, Hkv
    dims: tuple[int, int] = (16, 16)  # D, Dv
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    prefix: tuple[int, ...] | None = None  # per document
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    magnitude: float = 1.0  # standard deviation of the queries
    layout: str = "interleaved"  # of q, k, v; see helpers.make
    slow: bool = False
    dtypes: tuple[torch.dtype, ...] = field(default=KERNEL_DTYPES, repr=False)

    @property
    def k_runs(self) -> tuple[int, ...]:
        return self.q if self.k is None else self.k

    @property
    def total_q(self) -> int:
        return sum(abs(n) for n in self.q)

    @property
    def total_k(self) -> int:
        return sum(abs(n) for n in self.k_runs)

    @property
    def documents(self) -> list[Document]:
        q, k = spans(self.q), spans(self.k_runs)
        assert len(q) == len(k), self.name
        prefix = self.prefix or (None,) * len(q)
        return [Document(*a, *b, p) for a, b, p in zip(q, k, prefix, strict=True)]

    def packing(self) -> packattn.Packing:
        return make_packing(self.q)

    def packing_k(self) -> packattn.Packing | None:
        return None if self.k is None else make_packing(self.k)

    def mask_options(self) -> dict[str, Any]:
        """Keywords of packattn.dense_mask and of Packing.key_ranges."""
        options: dict[str, Any] = {"causal": self.causal, "window_size": self.window, "chunk_size": self.chunk}
        if self.prefix is not None:
            options["prefix_lengths"] = torch.tensor(self.prefix, dtype=torch.int32)
        return options

    def options(self) -> dict[str, Any]:
        """Keywords of packattn.attention, the packing of the keys among them; sinks are inputs, not here."""
        return self.mask_options() | {"packing_k": self.packing_k(), "scale": self.scale, "softcap": self.softcap}

    def alone(self, n: int) -> Case:
        """The case of document n by itself."""
        d = self.documents[n]
        return replace(
            self,
            name=f"{self.name}[{n}]",
            q=(d.q_length,),
            k=None if self.k is None else (d.k_length,),
            prefix=None if d.prefix is None else (d.prefix,),
        )


def spans(runs: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first row, length) of every document of the stream."""
    result, at = [], 0
    for n in runs:
        if n >= 0:
            result.append((at, n))
        at += abs(n)
    return result


def make_packing(runs: tuple[int, ...]) -> packattn.Packing:
    """The Packing of a stream, through the constructor that can say it."""
    inner = list(runs)
    while inner and inner[-1] < 0:
        inner.pop()
    if all(n >= 0 for n in inner):
        return packattn.Packing.from_lengths(inner, total=sum(abs(n) for n in runs))
    assert 0 not in runs, "segment ids cannot say a document without tokens"
    ids = [i + 1 if n > 0 else 0 for i, n in enumerate(runs) for _ in range(abs(n))]
    return packattn.Packing.from_segment_ids(torch.tensor(ids), pad_id=0)


ZEROS = (0, 5, 0, 0, 7, 0)  # cu_seqlens 0 0 5 5 5 12 12
SKEW = (180, 90, 60, 30, 20, 15, 8, 4, 2, 1)
TILES = (127, 1, 128, 65, 129)
BOTH = (-1, -1)

# Rows named reported_* stand for faults that people reported somewhere in this field.
CASES: list[Case] = [
    # Documents
    Case("one_token", (1,)),
    Case("three_documents", (3, 4, 2)),
    Case("three_documents_bidirectional", (3, 4, 2), causal=False),
    Case("one_document_33", (33,), dims=(64, 64)),
    Case("no_tokens", ()),
    Case("no_documents", (-3,)),
    Case("reported_zero_length_documents", ZEROS),
    Case("reported_zero_length_documents_bidirectional", ZEROS, causal=False, layout="transposed"),
    Case("only_zero_length_documents", (0, 0, 0)),
    Case("only_zero_length_documents_and_padding", (0, 0, -4), sinks=True),
    Case("one_token_documents", (1,) * 40, heads=(4, 2)),
    Case("reported_three_one_token_documents", (1, 1, 1), causal=False),
    Case("reported_tail_of_two_rows", (144, 288, 512, -2), dims=(64, 64)),
    Case("reported_tail_of_two_rows_bidirectional", (144, 288, 512, -2), dims=(64, 64), causal=False, sinks=True),
    Case("reported_odd_tail_1025", (1025,), heads=(2, 1), dims=(64, 64)),
    Case("reported_8192_documents_of_34", (34,) * 8192, heads=(1, 1), dims=(8, 8), layout="contiguous", slow=True),
    Case("padding_between", (5, -3, 4, -2)),
    Case("padding_between_bidirectional", (5, -3, 4, -2), causal=False, sinks=True, layout="sliced"),
    Case("padding_first", (-3, 5, 6)),
    Case("padding_everywhere", (-2, 1, -70, 66, -1, 33, -9), dims=(64, 64), heads=(4, 2)),
    Case("skew", SKEW, heads=(4, 2), dims=(64, 64)),
    Case("skew_bidirectional", SKEW, heads=(4, 2), dims=(64, 64), causal=False, layout="transposed"),
    Case("short_documents", (8,) * 60 + (7, 9), heads=(8, 8), dims=(64, 64)),
    Case("short_documents_128", (8, 3, 16, 24, 11) * 6, heads=(4, 2), dims=(128, 128), layout="sliced"),
    # Edges of tiles and chunks
    Case("tile_edges", TILES, dims=(64, 64)),
    Case("tile_edges_bidirectional", TILES, dims=(64, 64), causal=False, layout="transposed"),
    Case("tile_edges_128", TILES, dims=(128, 128), heads=(2, 1)),
    Case("row_block_edges", (191, 192, 193), heads=(4, 4), dims=(32, 32)),
    Case("row_block_edges_gqa", (95, 96, 97, 47, 48, 49), heads=(4, 1), dims=(64, 64)),
    Case("long_documents", (1023, 1024, 1026), heads=(1, 1), dims=(32, 32)),
    Case("long_document_bidirectional", (2049, 40), heads=(1, 1), dims=(16, 16), causal=False),
    Case("chunk_edges_of_the_backward", (4097, 5), heads=(1, 1), dims=(8, 8), slow=True),
    # Heads and head dims
    Case("gqa_8_2", (40, 7, 64), heads=(8, 2), dims=(64, 64)),
    Case("mqa_6_1", (40, 7, 64), heads=(6, 1), dims=(32, 32), causal=False),
    Case("gqa_9_3", (17, 5), heads=(9, 3)),
    Case("dim_8", (20, 45), dims=(8, 8)),
    Case("dim_24", (20, 45), dims=(24, 24), heads=(4, 2), layout="transposed"),
    Case("dim_40", (20, 45), dims=(40, 40), heads=(4, 2)),
    Case("dim_72_80", (20, 45), dims=(72, 80), layout="sliced"),
    Case("dim_128", (20, 45, 130), dims=(128, 128)),
    Case("dim_192_128", (20, 75), dims=(192, 128), heads=(4, 2)),
    Case("dim_64_128", (20, 75), dims=(64, 128), causal=False),
    Case("dim_256", (20, 75), dims=(256, 256), heads=(2, 1)),
    Case("dim_512", (20, 75), dims=(512, 512), heads=(2, 1)),
    Case("dim_8_512", (20, 45), dims=(8, 512)),
    Case("dim_12_falls_back", (20, 45), dims=(12, 12)),
    Case("dim_16_5_falls_back", (9, 4), dims=(16, 5), causal=False),
    Case("dim_520_falls_back", (9, 4), dims=(520, 8), heads=(1, 1)),
    # Other keys than queries
    Case("reported_cross_gqa", (0, 1, 0, 1), k=(0, 3, 0, 5), heads=(9, 3)),
    Case("reported_cross_gqa_bidirectional", (0, 1, 0, 1), k=(0, 3, 0, 5), heads=(9, 3), causal=False),
    Case("cross_k_longer", (3, 1, 20), k=(5, 9, 77), dims=(64, 64), heads=(4, 2)),
    Case("cross_k_shorter", (5, 9, 77), k=(3, 1, 20), dims=(64, 64), heads=(4, 2), sinks=True),
    Case("cross_k_shorter_bidirectional", (5, 9, 77), k=(3, 1, 20), causal=False),
    Case("cross_k_without_tokens", (4, 5, 6), k=(4, 0, 3), sinks=True),
    Case("cross_q_without_tokens", (4, 0, 3), k=(4, 5, 6)),
    Case("cross_no_keys", (3, 2), k=(0, 0), causal=False),
    Case("cross_padding", (5, -3, 4), k=(-2, 7, 2, -6), causal=False),
    Case("cross_padding_causal", (5, -3, 4), k=(-2, 7, 2, -6), layout="transposed"),
    Case("cross_window", (40, 9), k=(100, 30), window=(17, 3), causal=False, dims=(64, 64)),
    Case("cross_window_causal", (100, 30), k=(40, 9), window=(17, -1)),
    Case("cross_one_query", (1, 1, 1), k=(130, 1, 64), heads=(8, 2), dims=(64, 64)),
    # Windows
    Case("reported_window_0_0", (3, 4, 2), window=(0, 0)),
    Case("reported_window_0_0_bidirectional", (3, 4, 2), window=(0, 0), causal=False),
    Case("window_left", SKEW, window=(7, -1), heads=(4, 2), dims=(64, 64)),
    Case("window_left_0_right", (50, 20), window=(0, 3), causal=False),
    Case("window_both", SKEW, window=(9, 5), causal=False, heads=(4, 2), dims=(64, 64)),
    Case("window_right_only", (50, 20), window=(-1, 2), causal=False),
    Case("window_right_means_nothing_when_causal", (50, 20), window=(4, 6)),
    Case("window_of_a_tile", (300, 140), window=(128, 0), dims=(64, 64)),
    Case("window_longer_than_documents", (3, 40, 2), window=(64, 64), causal=False),
    Case("window_bfloat16_heavy", (513,), window=(100, 0), dims=(128, 128), heads=(2, 1)),
    # Chunks and prefixes
    Case("chunk_4", (10, 3, 17, 1), chunk=4),
    Case("chunk_64", (200, 64, 65), chunk=64, dims=(64, 64), heads=(4, 2)),
    Case("chunk_1", (5, 2), chunk=1),
    Case("chunk_and_window", (50, 30), chunk=16, window=(9, 0)),
    Case("chunk_cross", (9, 4), k=(21, 2), chunk=5),
    Case("prefix", (10, 3, 17, 4), prefix=(4, 0, 17, 9)),
    Case("prefix_and_window", (60, 30), prefix=(20, 5), window=(8, 0)),
    Case("prefix_cross", (9, 4, 6), k=(21, 2, 3), prefix=(18, 1, 3)),
    Case("prefix_long", (300, 140), prefix=(200, 3), dims=(64, 64), heads=(2, 1)),
    Case("prefix_padding", (6, -2, 5), prefix=(3, 2)),
    # Scores
    Case("scale_0", (3, 20), scale=0.0),
    Case("scale_negative", (3, 20), scale=-0.3),
    Case("scale_1", (30, 20), scale=1.0, dims=(64, 64)),
    Case("softcap", (30, 20, 5), softcap=2.0, magnitude=4.0, heads=(4, 2)),
    Case("softcap_large", (30, 20, 5), softcap=50.0, magnitude=10.0, causal=False),
    Case("sinks", (30, 20, 5), sinks=True, heads=(4, 2)),
    Case("sinks_bidirectional", (30, 20, -5), sinks=True, causal=False, dims=(64, 64)),
    Case("sinks_softcap_window", SKEW, sinks=True, softcap=5.0, window=(20, 0), heads=(4, 2), dims=(64, 64)),
    Case("sinks_cross_gqa", (0, 1, 0, 1), k=(0, 3, 0, 5), heads=(9, 3), sinks=True),
    Case("large_scores", (65, 20), magnitude=60.0, dims=(64, 64)),
    Case("larger_scores", (65, 20), magnitude=2000.0, dims=(64, 64), causal=False, dtypes=(FLOAT32,)),
    # Strides: q, k, v laid out otherwise
    Case("layout_contiguous", (30, 21), heads=(4, 2), dims=(64, 64), layout="contiguous"),
    Case("layout_transposed", (30, 21), heads=(4, 2), dims=(64, 64), layout="transposed"),
    Case("layout_sliced", (30, 21), heads=(4, 2), dims=(64, 64), layout="sliced"),
    Case("layout_strided_dim", (30, 21), heads=(4, 2), dims=(64, 64), layout="strided_dim"),
    Case("layout_expanded_heads", (30, 21), heads=(4, 2), dims=(64, 64), layout="expanded_heads"),
    Case("layout_expanded_rows", (30, 21), heads=(4, 2), dims=(64, 64), layout="expanded_rows"),
    Case("layout_reversed_heads", (30, 21), heads=(4, 2), dims=(64, 64), layout="swapped"),
]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases have one name"

# A few that together visit every feature: for suites that repeat all of it under another condition.
SUBSET = [
    BY_NAME[name]
    for name in (
        "three_documents",
        "reported_zero_length_documents",
        "reported_tail_of_two_rows",
        "padding_everywhere",
        "skew",
        "skew_bidirectional",
        "tile_edges_128",
        "dim_40",
        "dim_192_128",
        "cross_k_shorter",
        "window_both",
        "chunk_64",
        "prefix_long",
        "sinks_softcap_window",
        "layout_strided_dim",
    )
]
# Small enough for gradcheck, opcheck and the dense oracles of every op.
TINY = [case for case in CASES if case.total_q <= 60 and case.total_k <= 60 and case.dims[0] <= 80 and not case.slow]


def id_of(value: Any) -> str | None:
    """Names in pytest's output."""
    if isinstance(value, Case):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return None


# position_ids, keywords, right cu_seqlens
POSITION_CASES: dict[str, tuple[list[Any], dict[str, Any], list[int]]] = {
    "two_documents": ([0, 1, 2, 0, 1], {}, [0, 3, 5]),
    "reported_three_one_token_documents": ([0, 0, 0], {}, [0, 1, 2, 3]),
    "reported_one_token_between_two": ([0, 1, 0, 0, 1, 2], {}, [0, 2, 3, 6]),
    "reported_continued_document_first": ([5, 6, 7, 0, 1, 2], {}, [0, 3, 6]),
    "reported_left_padding_of_ones": ([1, 1, 1, 0, 1, 2], {}, [0, 1, 2, 3, 6]),
    "reported_right_padding_of_minus_ones": ([0, 1, 2, 0, 1, -1, -1], {}, [0, 3, 5, 6, 7]),
    "right_padding_of_zeros": ([0, 1, 2, 0, 0], {}, [0, 3, 4, 5]),
    "reported_two_packed_rows": ([[0, 1, 2, 0], [0, 1, 0, 1]], {}, [0, 3, 4, 6, 8]),
    "reported_no_running_on_into_the_next_row": ([[0, 1, 2, 3], [4, 5, 0, 1]], {}, [0, 4, 6, 8]),
    "reported_jumps_step": ([0, 1, 50, 51, 0, 1, 60], {}, [0, 2, 4, 6, 7]),
    "reported_jumps_zero": ([0, 1, 50, 51, 0, 1, 60], {"rule": "zero"}, [0, 4, 7]),
    "zero_rule_rows": ([[0, 1, 0], [0, 1, 2]], {"rule": "zero"}, [0, 2, 3, 6]),
    "zero_rule_continued_rows": ([[5, 6, 0], [1, 2, 0]], {"rule": "zero"}, [0, 2, 3, 5, 6]),
    "reported_no_tokens": ([], {}, [0]),
    "no_tokens_in_rows": ([[], []], {}, [0]),
    "one_token": ([7], {}, [0, 1]),
    "capacity": ([0, 1, 2, 0, 1], {"max_segments": 4}, [0, 3, 5, 5, 5]),
    "capacity_exact": ([0, 1, 2, 0, 1], {"max_segments": 2}, [0, 3, 5]),
    "capacity_no_tokens": ([], {"max_segments": 2}, [0, 0, 0]),
}

# segment_ids, keywords, right cu_seqlens (trailing padding left out, padding between an entry of its own),
# right spans (first row, one past the last) of the documents
SEGMENT_CASES: dict[str, tuple[list[Any], dict[str, Any], list[int], list[tuple[int, int]]]] = {
    "reported_padding_last": ([1, 1, 2, 2, 2, 0], {"pad_id": 0}, [0, 2, 5], [(0, 2), (2, 5)]),
    "reported_first_document_is_0": ([0, 0, 1, 1, 2], {}, [0, 2, 4, 5], [(0, 2), (2, 4), (4, 5)]),
    "reported_id_comes_back": ([1, 1, 2, 1, 1], {}, [0, 2, 3, 5], [(0, 2), (2, 3), (3, 5)]),
    "unsorted": ([9, 9, 3, 3, 3, 7], {}, [0, 2, 5, 6], [(0, 2), (2, 5), (5, 6)]),
    "negative_ids": ([-1, -1, -2, 5], {}, [0, 2, 3, 4], [(0, 2), (2, 3), (3, 4)]),
    "pad_id_minus_one": ([0, 0, 1, -1, -1], {"pad_id": -1}, [0, 2, 3], [(0, 2), (2, 3)]),
    "reported_batch_padded_rows": (
        [[1, 1, 2, 0], [1, 2, 2, 2], [1, 0, 0, 0]],
        {"pad_id": 0},
        [0, 2, 3, 4, 5, 8, 9],
        [(0, 2), (2, 3), (4, 5), (5, 8), (8, 9)],
    ),
    "batch_same_id_in_two_rows": ([[1, 1], [1, 1]], {}, [0, 2, 4], [(0, 2), (2, 4)]),
    "padding_first": ([0, 0, 1, 1], {"pad_id": 0}, [0, 2, 4], [(2, 4)]),
    "same_id_around_padding": ([1, 0, 1], {"pad_id": 0}, [0, 1, 2, 3], [(0, 1), (2, 3)]),
    "only_padding": ([0, 0, 0], {"pad_id": 0}, [0], []),
    "no_tokens": ([], {}, [0], []),
    "capacity": ([4, 4, 5], {"max_segments": 4}, [0, 2, 3, 3, 3], [(0, 2), (2, 3), (3, 3), (3, 3)]),
}

# What no cu_seqlens may be, for a stream of 6 tokens: tensor, a word the message must hold
BAD_CU_SEQLENS: dict[str, tuple[torch.Tensor, str]] = {
    "decreasing": (torch.tensor([0, 4, 2, 6], dtype=torch.int32), "decreas"),
    "not_starting_at_0": (torch.tensor([1, 4, 6], dtype=torch.int32), "start"),
    "negative": (torch.tensor([-1, 4, 6], dtype=torch.int32), "start"),
    "past_the_end": (torch.tensor([0, 4, 7], dtype=torch.int32), "total"),
    "float": (torch.tensor([0.0, 4.0, 6.0]), "int"),
    "two_dimensional": (torch.tensor([[0, 4, 6]], dtype=torch.int32), "1-D"),
    "no_entries": (torch.tensor([], dtype=torch.int32), "cu_seqlens"),
}
