"""How full packed rows are, and how even their cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..packer import Bins
from ..verify.report import plural
from .style import DOCUMENTS, LEAKS, PADDING, new_figure, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SINGLE = 64  # bins up to which every bin is a bar, made of its documents
_COST = "#8A8A8A"
_BARS = 512  # bars of a longer packing: equal parts of it, sorted


def plot_bins(
    bins: Bins | Mapping[str, Bins], *, title: str | None = None, figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Draws how full the rows of a packing are, and what attention costs in each.

    Above, the tokens of every row: its documents in colours, and what is padding in grey. Below, the sum of its
    documents' squared lengths, to which the cost of attention is proportional, with the mean as a line: ranks that train
    rows of unequal cost wait for each other. Up to 64 rows stand in their order; more are sorted, fullest (dearest) first,
    and single documents are not told apart.

    Args:
        bins: what :func:`packattn.pack` returned. A mapping of titles to several is drawn side by side.
        title: above all panels.
        figure: a Figure or SubFigure to draw into; the default is a new Figure.

    Returns:
        The figure that was drawn into.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: not what pack returns.
        ValueError: no bins.
    """
    named = dict(bins) if isinstance(bins, Mapping) else {"": bins}
    if not named:
        raise ValueError("bins must hold at least one packing, got an empty mapping")
    for name, one in named.items():
        if not isinstance(one, Bins):
            raise TypeError(f"bins must be what packattn.pack returns, got {type(one).__name__}")
        if not one.num_bins:
            raise ValueError(
                f"bins must hold at least one bin, got none{f' in {name!r}' if name else ''}: nothing to draw"
            )
    figure = new_figure(figure, (4.6 * len(named) + 1.2, 5.2))
    grid = figure.subplots(2, len(named), squeeze=False, sharey="row", height_ratios=(3, 2))
    for number, (name, one) in enumerate(named.items()):
        top, bottom = grid[0][number], grid[1][number]
        _fill(top, one)
        _costs(bottom, one)
        documents = len(np.unique(one.items))
        words = [
            f"{plural(documents, 'document')} in {plural(one.num_bins, 'row')} of {one.capacity}",
            f"{one.fill:.2%} full" + (f", {one.truncated_tokens} tokens cut off" if one.truncated_tokens else ""),
        ]
        top.set_title("\n".join(filter(None, [name, *words])), fontsize=9)
        if number == 0:
            top.set_ylabel("tokens")
            bottom.set_ylabel("attention cost\n(sum of squared lengths)")
        many = one.num_bins > _SINGLE
        bottom.set_xlabel("rows, each quantity sorted" if many else "row")
    _legend(figure, named)
    if title is not None:
        figure.suptitle(title)
    return figure


def _fill(axes: Axes, bins: Bins) -> None:
    capacity, count = bins.capacity, bins.num_bins
    if count <= _SINGLE and len(bins.items) <= 64 * _SINGLE:
        rows, ends = bins.bin_of, np.cumsum(bins.lengths)
        before = np.concatenate([[0], np.cumsum(bins.tokens)])[:-1]
        place = np.arange(len(rows)) - bins.offsets[:-1][rows]  # of the fragment in its bin
        axes.bar(np.arange(count), np.full(count, capacity), width=0.9, color=PADDING)
        colors = [DOCUMENTS[int(n) % len(DOCUMENTS)] for n in place]
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4 if len(rows) <= 8 * _SINGLE else 0.0}
        axes.bar(rows, bins.lengths, bottom=ends - bins.lengths - before[rows], width=0.9, color=colors, **style)
        axes.set_xlim(-0.6, count - 0.4)
    else:
        x, width, heights = _sorted(bins.tokens)
        axes.bar(x, np.full(len(x), capacity), width=width, color=PADDING, align="edge")
        axes.bar(x, heights, width=width, color=DOCUMENTS[0], align="edge")
        axes.set_xlim(0, count)
    axes.set_ylim(0, capacity)
    whole_ticks(axes)


def _costs(axes: Axes, bins: Bins) -> None:
    costs, count = bins.costs, bins.num_bins
    mean, high = float(costs.mean()), int(costs.max())
    if count <= _SINGLE:
        axes.bar(np.arange(count), costs, width=0.9, color=_COST)
        axes.set_xlim(-0.6, count - 0.4)
    else:
        x, width, heights = _sorted(costs)
        axes.bar(x, heights, width=width, color=_COST, align="edge")
        axes.set_xlim(0, count)
    axes.axhline(mean, color=LEAKS[2], linewidth=1)
    ratio = f"{high / mean:.2f}" if mean else "1"
    axes.set_title(f"largest {ratio} x the mean", fontsize=9)
    axes.set_ylim(0, max(high, 1) * 1.08)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 4))
    whole_ticks(axes)


def _sorted(values: Any) -> tuple[Any, Any, Any]:
    """Left edges, widths and heights of bars for values from large to small; many are averaged in equal parts."""
    values = np.sort(np.asarray(values, dtype=np.float64))[::-1]
    edges = np.unique(np.linspace(0, len(values), min(len(values), _BARS) + 1).astype(np.int64))
    heights = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    return edges[:-1], np.diff(edges), heights


def _legend(figure: Figure | SubFigure, named: dict[str, Bins]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    single = all(one.num_bins <= _SINGLE for one in named.values())
    handles: list[Any] = [
        Patch(facecolor=DOCUMENTS[0], label="documents (a colour each)" if single else "documents"),
        Patch(facecolor=PADDING, label="padding"),
        Patch(facecolor=_COST, label="cost"),
        Line2D([], [], color=LEAKS[2], linewidth=1, label="mean cost"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
