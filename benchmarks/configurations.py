"""What is measured: mixes of document lengths, head shapes and dtypes. No Torch in this file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

CASES: dict[str, list[int]] = {
    "1x4096": [4096],
    "4x1024": [1024] * 4,
    "16x256": [256] * 16,
    "64x64": [64] * 64,
    "512x8": [8] * 512,
    "skew": [1800, 900, 600, 300, 200, 150, 80, 40, 20, 6],
    "1x16384": [16384],
}
"""Lengths for 4096 tokens. A larger total repeats the mix, except 1x16384, which exists only there."""

SHAPES: list[tuple[int, int, int]] = [(8, 8, 64), (8, 8, 128), (8, 2, 64)]
"""(query heads, key/value heads, head dim)."""

DTYPES = ["float32", "bfloat16"]
TOKENS = [4096, 16384]
DIRECTIONS = ["forward", "forward_backward"]
IMPLEMENTATIONS = ["packattn", "sdpa_loop", "sdpa_dense", "sdpa_padded", "flex", "mm"]


@dataclass(frozen=True)
class Configuration:
    """One benchmark problem: causal attention inside documents of the given lengths.

    head_dim_v: of the values, 0 where it is head_dim. documents: their lengths, where the case is none of CASES.
    """

    case: str
    tokens: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str
    head_dim_v: int = 0
    documents: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def head_dims(self) -> str:
        return f"{self.head_dim}/{self.dim_v}" if self.head_dim_v else str(self.head_dim)

    @property
    def lengths(self) -> list[int]:
        if self.documents:
            return list(self.documents)
        lengths = CASES[self.case]
        return lengths * (self.tokens // sum(lengths))

    @property
    def heads(self) -> str:
        return f"{self.heads_q}/{self.heads_kv}"

    @property
    def visible_scores(self) -> int:
        """(query, key) pairs the causal mask leaves, over all query heads."""
        return self.heads_q * sum(n * (n + 1) // 2 for n in self.lengths)

    def useful_flops(self, direction: str) -> float:
        """Only visible scores count: 2 D + 2 Dv flops each in the forward. The backward has five products to its two:
        6 D + 4 Dv, so that both together are 7/2 of the forward where D = Dv. direction: "forward", "backward" or
        "forward_backward"."""
        forward = 2.0 * (self.head_dim + self.dim_v) * self.visible_scores
        backward = 2.0 * (3 * self.head_dim + 2 * self.dim_v) * self.visible_scores
        return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[direction]

    def __str__(self) -> str:
        return f"{self.case} T={self.tokens} D={self.head_dims} H={self.heads} {self.dtype}"


def configurations(
    *,
    dtypes: Iterable[str],
    head_dims: Iterable[int],
    heads: Iterable[str],
    cases: Iterable[str],
    tokens: Iterable[int],
    full: bool,
) -> Iterator[Configuration]:
    """The chosen part of the matrix; without `full`, 16384 tokens are measured at D = 64 and 8/8 heads only."""
    dtypes, head_dims, heads, cases = set(dtypes), set(head_dims), set(heads), set(cases)
    for total in tokens:
        for dtype in (d for d in DTYPES if d in dtypes):
            for heads_q, heads_kv, head_dim in SHAPES:
                if head_dim not in head_dims or f"{heads_q}/{heads_kv}" not in heads:
                    continue
                if total > 4096 and not full and (heads_q, heads_kv, head_dim) != (8, 8, 64):
                    continue
                for case, lengths in CASES.items():
                    if case in cases and sum(lengths) <= total:
                        yield Configuration(case, total, heads_q, heads_kv, head_dim, dtype)
