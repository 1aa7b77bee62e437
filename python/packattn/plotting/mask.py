"""The mask of a packed row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..packing import Packing
from ..verify.report import plural
from .style import DOCUMENTS, GRID, LINE, PADDING, cells, new_figure, sample, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


def plot_mask(
    packing: Packing,
    *,
    packing_k: Packing | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Tensor | None = None,
    title: str | None = None,
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    """Draws which keys each query of a packed row sees, with documents, boundaries, padding and positions.

    Args:
        packing: of the queries.
        packing_k: of the keys, if they are packed otherwise.
        causal, window_size, chunk_size, prefix_lengths: as for Packing.key_ranges.
        title: instead of one that says what is drawn.
        figure: a Figure or SubFigure to draw into; the default is a new Figure.

    Returns:
        The figure that was drawn into.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the packing has no tokens.
    """
    keys = packing if packing_k is None else packing_k
    if packing.total == 0 or keys.total == 0:
        raise ValueError("packing must have tokens, got none: there is nothing to draw")
    figure = new_figure(figure, (6.4, 7.2))
    import matplotlib as mpl

    ranges = packing.key_ranges(
        packing_k, causal=causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths
    )
    begin, end = (x.cpu() for x in ranges)
    packing, keys = packing.to("cpu"), keys.to("cpu")
    total_q, total_k = packing.total, keys.total
    rows, columns = sample(total_q), sample(total_k)
    visible = (columns >= begin[rows, None]) & (columns < end[rows, None])
    number = packing.segment_ids.long()[rows]

    palette = torch.tensor([mpl.colors.to_rgb(colour) for colour in DOCUMENTS])
    image = torch.ones(len(rows), len(columns), 3)
    empty = packing.is_padding[rows, None] | keys.is_padding[columns]
    image[empty] = torch.tensor(mpl.colors.to_rgb(PADDING))
    image = torch.where(visible[..., None], palette[number.clamp_min(0) % len(palette)][:, None], image)

    grid = figure.add_gridspec(2, 1, height_ratios=(1, 7), hspace=0.04)
    strip = figure.add_subplot(grid[0])
    axes = figure.add_subplot(grid[1], sharex=strip)
    axes.imshow(image.numpy(), extent=(0, total_k, total_q, 0), interpolation="nearest", aspect="auto")
    cells(axes, total_q, total_k)
    across, down = _edges(keys), _edges(packing)
    if max(len(across), len(down)) <= 64:
        for edge in across:
            axes.axvline(edge, color=LINE, linewidth=0.7)
        for edge in down:
            axes.axhline(edge, color=LINE, linewidth=0.7)
    _name_documents(axes, packing)
    axes.set_xlabel("key (token of the row)")
    axes.set_ylabel("query (token of the row)")
    whole_ticks(axes)

    _positions(strip, keys)
    strip.set_title(
        title if title is not None else _mask_title(packing, causal, window_size, chunk_size, prefix_lengths)
    )
    return figure


def _edges(packing: Packing) -> list[int]:
    """Where one document, or run of padding, meets the next."""
    changes = packing.segment_ids[1:] != packing.segment_ids[:-1]
    return [int(edge) + 1 for edge in changes.nonzero().flatten()]


def _name_documents(axes: Axes, packing: Packing) -> None:
    """Number and length of each document beside its rows, as far as they have room."""
    taken = -1.0
    for number, rows in enumerate(packing.documents()):
        middle = (rows.start + rows.stop) / 2 / packing.total
        if rows.stop == rows.start or middle - taken < 0.03:
            continue
        taken = middle
        axes.annotate(
            f"{number}: {plural(rows.stop - rows.start, 'token')}",
            (1.01, 1 - middle),
            xycoords="axes fraction",
            va="center",
            fontsize=7,
            color=LINE,
            annotation_clip=False,
        )


def _positions(strip: Axes, packing: Packing) -> None:
    """Positions over the row, a saw tooth per document."""
    columns = sample(packing.total)
    positions = packing.position_ids[columns].double()
    # A gap where the next document begins: no line falls from the end of one to the start of the other.
    segment = packing.segment_ids[columns]
    starts = torch.zeros_like(segment, dtype=torch.bool)
    starts[1:] = (segment[1:] != segment[:-1]) | (positions[1:] <= positions[:-1])
    x, y = (columns + 0.5).double(), positions
    if packing.total <= GRID:
        strip.plot(x.numpy(), y.numpy(), ".", color=LINE, markersize=4)
    pieces = torch.nonzero(starts).flatten().tolist()
    for first, last in zip([0, *pieces], [*pieces, len(columns)], strict=True):
        style: dict[str, Any] = {"color": "#999999", "linewidth": 1.0, "linestyle": ":"}
        if segment[first] >= 0:
            style = {"color": DOCUMENTS[int(segment[first]) % len(DOCUMENTS)], "linewidth": 1.5}
        strip.plot(x[first:last].numpy(), y[first:last].numpy(), **style)
    strip.set_ylabel("position")
    strip.tick_params(labelbottom=False)
    strip.margins(y=0.15)
    for side in ("top", "right"):
        strip.spines[side].set_visible(False)


def _mask_title(
    packing: Packing, causal: bool, window_size: tuple[int, int], chunk_size: int, prefix_lengths: Tensor | None
) -> str:
    words = ["causal" if causal else "bidirectional"]
    left, right = window_size
    if left >= 0 or right >= 0:
        sides = [f"{left} back" if left >= 0 else "", f"{right} ahead" if right >= 0 and not causal else ""]
        words.append(f"window {', '.join(side for side in sides if side)}")
    if chunk_size > 0:
        words.append(f"chunks of {chunk_size}")
    if prefix_lengths is not None:
        words.append("prefixes")
    documents = int((packing.lengths > 0).sum())
    padding = int(packing.is_padding.sum())
    tail = f", {padding} of them padding" if padding else ""
    return f"{', '.join(words)}\n{plural(documents, 'document')}, {plural(packing.total, 'token')}{tail}"
