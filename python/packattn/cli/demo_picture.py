"""The demo's picture: the mask of one row, and what leaks between its documents in each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from packattn import Packing, plotting
from packattn.cli.demo_proof import Proof


def draw(path: Path, documents: Sequence[Tensor], proofs: Sequence[Proof]) -> str:
    """Write the picture and return a sentence about it. Without matplotlib nothing is written, and the sentence says so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return (
            'No picture: it needs matplotlib. Get it with `pip install "packattn[demo]"` or `pip install matplotlib`.'
        )
    figure = Figure(figsize=(11, 11), layout="constrained", dpi=120)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.35, 1), width_ratios=(1, 4, 1))
    plotting.plot_mask(
        Packing.from_lengths([len(document) for document in documents]),
        title="Who sees whom in one packed row: causal inside each document",
        figure=figure.add_subfigure(grid[0, 1]),
    )
    plotting.plot_influence(
        {f"{proof.variant.name}\nmask {proof.variant.mask}": proof.report for proof in proofs},
        title="What replacing one document does to the logits of the others",
        figure=figure.add_subfigure(grid[1, :]),
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # a folder that cannot be written to; a suffix that matplotlib does not know
        return f"No picture: {path} cannot be written: {error}"
    return f"Picture: {path}"
