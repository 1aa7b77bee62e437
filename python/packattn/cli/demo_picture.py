"""The demo's picture: the mask of one row, and what leaks between its documents in each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from packattn.cli.demo_proof import Proof


def draw(path: Path, documents: Sequence[Tensor], proofs: Sequence[Proof]) -> str:
    """Write the picture and return a sentence about it. Without matplotlib nothing is written, and the sentence says so."""
    try:
        from packattn import plotting  # noqa: F401
    except ImportError:
        return (
            'No picture: it needs matplotlib; get it with `pip install "packattn[demo]"` or `pip install matplotlib`.'
        )
    raise NotImplementedError
