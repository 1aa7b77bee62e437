"""Colours and parts that several pictures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

DOCUMENTS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#5D6BB0", "#88CCB5")  # neighbours differ in lightness
ALLOWED = "#A9CFE8"
LEAKS = ("#FBD9B5", "#E69F00", "#D55E00", "#7A2A00")
PADDING = "#D9D9D9"
LINE = "#4D4D4D"
PIXELS = 1024  # rows and columns of an image; longer packings are sampled
GRID = 40  # tokens up to which every cell has an outline


def sample(total: int) -> Tensor:
    """The rows or columns that become pixels: all of them, or the middle of equal parts."""
    pixels = min(total, PIXELS)
    return ((torch.arange(pixels, dtype=torch.float64) + 0.5) * total / pixels).long()


def cells(axes: Axes, height: int, width: int) -> None:
    """Outlines of single cells, where there are few."""
    if max(height, width) > GRID:
        return
    style: dict[str, Any] = {"color": "#E6E6E6", "linewidth": 0.5}
    axes.hlines(range(1, height), 0, width, **style)
    axes.vlines(range(1, width), 0, height, **style)


def whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def new_figure(figure: Figure | SubFigure | None, size: tuple[float, float]) -> Figure | SubFigure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('packattn.plotting needs matplotlib: pip install "packattn[plot]"') from error
    return Figure(figsize=size, layout="constrained") if figure is None else figure
