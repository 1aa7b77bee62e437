"""What sees what, found against expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..verify import AttentionReport, ProbeReport
from ..verify.report import Spans, magnitude
from .style import ALLOWED, LEAKS, LINE, PADDING, cells, new_figure, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Found = AttentionReport | ProbeReport | Tensor
NUMBERS = 8  # documents up to which every cell of an influence matrix has its number


def plot_influence(
    found: Found | Mapping[str, Found],
    *,
    expected: Tensor | None = None,
    title: str | None = None,
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    """Draws what sees what, found against expected. Rows are what sees, columns are what is seen.

    Blue is an influence that must be there, white none, orange a leak (darker is larger, one scale for all panels), and
    a cross marks an influence that is missing. Only an influence of exactly 0 is white.

    Args:
        found: a report of check_attention (drawn as the expected mask, what replacing keys moves, and where gradients
            reach), one of probe (documents against documents), or a matrix [A, B] of influences, B on A. A mapping of
            titles to any of these is drawn side by side.
        expected: bool [A, B], where a matrix may have an influence and must; the default is its diagonal.
        title: above all panels.
        figure: a Figure or SubFigure to draw into; the default is a new Figure.

    Returns:
        The figure that was drawn into.

    Raises:
        ImportError: matplotlib is missing.
        TypeError, ValueError: nothing to draw, or something that is no report and no matrix.
    """
    named = dict(found) if isinstance(found, Mapping) else {"": found}
    if not named:
        raise ValueError("found must hold at least one report or matrix, got an empty mapping")
    if isinstance(found, AttentionReport):
        panels = _attention_panels(found)
    else:
        panels = [_panel(name, item, expected) for name, item in named.items()]
    figure = new_figure(figure, (3.6 * len(panels) + 0.9, 4.3))
    draw_panels(figure, panels, len(panels))
    if title is not None:
        figure.suptitle(title)
    return figure


def draw_panels(figure: Figure | SubFigure, panels: list[Panel], columns: int) -> None:
    """The panels in rows of so many columns, with one scale and one legend for all."""
    import matplotlib as mpl
    import matplotlib.ticker

    # One scale for all the leaks: the panels are there to be compared.
    leaks = torch.cat([panel.matrix[~panel.allowed] for panel in panels])
    leaks = leaks[(leaks > 0) & leaks.isfinite()]
    high = float(leaks.max()) if leaks.numel() else 1.0
    low = max(float(leaks.min()) if leaks.numel() else high / 10, high * 1e-8)
    norm = mpl.colors.LogNorm(min(low, high / 10), high, clip=True)
    scale = mpl.colors.LinearSegmentedColormap.from_list("leak", LEAKS)

    places = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten().tolist()
    grid, spare = places[: len(panels)], places[len(panels) :]
    for axes in spare:
        axes.remove()
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, norm, scale)
    if any(panel.leak > 0 for panel in panels):
        mappable = mpl.cm.ScalarMappable(norm, scale)
        label = "leak: influence that must not be there"
        number = mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}")
        bar = figure.colorbar(mappable, ax=grid, shrink=0.8, label=label, format=number)
        bar.locator = mpl.ticker.LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,))
        bar.minorticks_off()
        bar.ax.tick_params(labelsize=8)
    _legend(figure, panels)


# ---- panels of plot_influence ------------------------------------------------------------------------------------


class Panel:
    """A matrix with what it may be. seen_by, seen: the names of its axes. unit: what its numbers are."""

    def __init__(self, title: str, matrix: Tensor, allowed: Tensor, required: Tensor, seen_by: str, seen: str) -> None:
        self.title = title
        self.matrix, self.allowed, self.required = matrix.double().cpu(), allowed.cpu(), required.cpu()
        self.seen_by, self.seen = seen_by, seen
        self.lines: tuple[list[int], list[int]] = ([], [])
        self.judged = True

    @property
    def leak(self) -> float:
        return float(self.matrix.masked_fill(self.allowed, 0.0).max())

    @property
    def blind(self) -> int:
        return int(((self.matrix == 0) & self.required).sum())

    @property
    def verdict(self) -> str:
        if not self.judged:
            return ""
        if self.matrix.isnan().any():
            return "not measured"
        words = f"leak {magnitude(self.leak)}" if self.leak else "leak exactly 0"
        return words + (f", {self.blind} missing" if self.blind else "")


def _attention_panels(report: AttentionReport) -> list[Panel]:
    edges = ends(report.documents, report.expected.shape[0]), ends(report.documents_k, report.expected.shape[1])
    panels = [Panel("expected", report.expected.double(), report.expected, report.expected, "query", "key")]
    panels[0].judged = False
    found = [("found by replacing keys", report.influence), ("found by gradients", report.gradient)]
    for title, matrix in found:
        if matrix is not None:
            panels.append(Panel(title, matrix, report.expected, report.expected, "query", "key"))
    for panel in panels:
        panel.lines = edges
    return panels


def _panel(title: str, found: Found, expected: Tensor | None) -> Panel:
    if isinstance(found, ProbeReport):
        # Replaced documents across, documents that answer down: the triangle of a causal leak lies as in the mask.
        itself = torch.eye(len(found.lengths), dtype=torch.bool)
        needed = itself & (torch.tensor(found.lengths) > 0)
        return Panel(title, found.influence.T, itself, needed, "logits of document", "document replaced")
    if isinstance(found, AttentionReport):
        panel = Panel(title, found.influence, found.expected, found.expected, "query", "key")
        panel.lines = (ends(found.documents, panel.matrix.shape[0]), ends(found.documents_k, panel.matrix.shape[1]))
        return panel
    if not isinstance(found, Tensor):
        raise TypeError(f"found must be a report of check_attention or probe, or a matrix, got {type(found).__name__}")
    if found.dim() != 2 or found.numel() == 0:
        raise ValueError(f"found must be a matrix [A, B] that is not empty, got shape {list(found.shape)}")
    if expected is None:
        expected = torch.eye(*found.shape, dtype=torch.bool)
    if expected.shape != found.shape or expected.dtype != torch.bool:
        raise ValueError(
            f"expected must be bool {list(found.shape)} like found, got {expected.dtype} {list(expected.shape)}"
        )
    return Panel(title, found.detach(), expected, expected, "sees", "is seen")


def _draw_panel(axes: Axes, panel: Panel, norm: Any, scale: Any) -> None:
    import matplotlib as mpl

    matrix = panel.matrix
    height, width = matrix.shape
    image = torch.ones(height, width, 3, dtype=torch.float64)
    image[(matrix != 0) & panel.allowed] = torch.tensor(mpl.colors.to_rgb(ALLOWED), dtype=torch.float64)
    leaks = (matrix != 0) & ~panel.allowed & ~matrix.isnan()
    if leaks.any():
        sizes = matrix[leaks].clamp(max=norm.vmax)
        image[leaks] = torch.tensor(scale(norm(sizes.numpy())), dtype=torch.float64)[:, :3]
    image[matrix.isnan()] = torch.tensor(mpl.colors.to_rgb(PADDING), dtype=torch.float64)
    axes.imshow(image.numpy(), extent=(0, width, height, 0), interpolation="nearest")
    cells(axes, height, width)
    for edge in panel.lines[0]:
        axes.axhline(edge, color=LINE, linewidth=0.7)
    for edge in panel.lines[1]:
        axes.axvline(edge, color=LINE, linewidth=0.7)
    missing = ((matrix == 0) & panel.required).nonzero() + 0.5
    if len(missing):
        size = max(8.0, min(60.0, 4000.0 / max(height, width)))
        axes.scatter(missing[:, 1].numpy(), missing[:, 0].numpy(), marker="x", s=size, color="black", linewidth=1)
    if max(height, width) <= NUMBERS and not panel.lines[0]:
        for i, line in enumerate(matrix.tolist()):
            for j, value in enumerate(line):
                dark = bool(leaks[i, j]) and float(norm(min(value, norm.vmax))) > 0.6
                text = short(value)
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", size=7, color="white" if dark else "black")
    _document_ticks(axes, panel, height, width)
    axes.set_ylabel(panel.seen_by)
    axes.set_xlabel(panel.seen)
    axes.set_title("\n".join(line for line in (panel.title, panel.verdict) if line), fontsize=10)


def _legend(figure: Figure | SubFigure, panels: list[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=ALLOWED, label="must be there"),
        Patch(facecolor="white", edgecolor=LINE, linewidth=0.5, label="none (exactly 0)"),
    ]
    if any(panel.leak > 0 for panel in panels):
        handles.append(Patch(facecolor=LEAKS[2], label="leak"))
    if any(panel.blind for panel in panels):
        handles.append(Line2D([], [], marker="x", color="black", linestyle="", markersize=5, label="missing"))
    if any(panel.matrix.isnan().any() for panel in panels):
        handles.append(Patch(facecolor=PADDING, label="not measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _document_ticks(axes: Axes, panel: Panel, height: int, width: int) -> None:
    if panel.lines[0] or max(height, width) > 24:
        whole_ticks(axes)
        return
    axes.set_xticks([j + 0.5 for j in range(width)], [str(j) for j in range(width)], fontsize=8)
    axes.set_yticks([i + 0.5 for i in range(height)], [str(i) for i in range(height)], fontsize=8)
    axes.tick_params(length=0)


def short(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.2g}"


def ends(documents: Spans, total: int) -> list[int]:
    """Where documents begin and end, but for the ends of the row."""
    return sorted({edge for span in documents if span[0] < span[1] for edge in span if 0 < edge < total})
