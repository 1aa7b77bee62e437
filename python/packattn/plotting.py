"""Pictures of packed rows: the mask of a row, and what sees what.

Needs matplotlib (``pip install "packattn[plot]"``), imported when something is drawn. Nothing here touches pyplot, so
no display and no backend is needed: every function returns a Figure, to be saved with ``figure.savefig(path)``.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which stay apart for colour-blind readers; what
is a fault differs in lightness or shape too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .packing import Packing
from .verify import AttentionReport, ProbeReport
from .verify.report import Spans, magnitude, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Found = AttentionReport | ProbeReport | Tensor

_DOCUMENTS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#5D6BB0", "#88CCB5")  # neighbours differ in lightness
_ALLOWED = "#A9CFE8"
_LEAKS = ("#FBD9B5", "#E69F00", "#D55E00", "#7A2A00")
_PADDING = "#D9D9D9"
_LINE = "#4D4D4D"
_PIXELS = 1024  # rows and columns of an image; longer packings are sampled
_GRID = 40  # tokens up to which every cell has an outline
_NUMBERS = 8  # documents up to which every cell of an influence matrix has its number


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
    figure = _figure(figure, (6.4, 7.2))
    import matplotlib as mpl

    ranges = packing.key_ranges(
        packing_k, causal=causal, window_size=window_size, chunk_size=chunk_size, prefix_lengths=prefix_lengths
    )
    begin, end = (x.cpu() for x in ranges)
    packing, keys = packing.to("cpu"), keys.to("cpu")
    total_q, total_k = packing.total, keys.total
    rows, columns = _sample(total_q), _sample(total_k)
    visible = (columns >= begin[rows, None]) & (columns < end[rows, None])
    number = packing.segment_ids.long()[rows]

    palette = torch.tensor([mpl.colors.to_rgb(colour) for colour in _DOCUMENTS])
    image = torch.ones(len(rows), len(columns), 3)
    empty = packing.is_padding[rows, None] | keys.is_padding[columns]
    image[empty] = torch.tensor(mpl.colors.to_rgb(_PADDING))
    image = torch.where(visible[..., None], palette[number.clamp_min(0) % len(palette)][:, None], image)

    grid = figure.add_gridspec(2, 1, height_ratios=(1, 7), hspace=0.04)
    strip = figure.add_subplot(grid[0])
    axes = figure.add_subplot(grid[1], sharex=strip)
    axes.imshow(image.numpy(), extent=(0, total_k, total_q, 0), interpolation="nearest", aspect="auto")
    _cells(axes, total_q, total_k)
    across, down = _edges(keys), _edges(packing)
    if max(len(across), len(down)) <= 64:
        for edge in across:
            axes.axvline(edge, color=_LINE, linewidth=0.7)
        for edge in down:
            axes.axhline(edge, color=_LINE, linewidth=0.7)
    _name_documents(axes, packing)
    axes.set_xlabel("key (token of the row)")
    axes.set_ylabel("query (token of the row)")
    _whole_ticks(axes)

    _positions(strip, keys)
    strip.set_title(
        title if title is not None else _mask_title(packing, causal, window_size, chunk_size, prefix_lengths)
    )
    return figure


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
    figure = _figure(figure, (3.6 * len(panels) + 0.9, 4.3))
    import matplotlib as mpl
    import matplotlib.ticker

    # One scale for all the leaks: the panels are there to be compared.
    leaks = torch.cat([panel.matrix[~panel.allowed] for panel in panels])
    leaks = leaks[(leaks > 0) & leaks.isfinite()]
    high = float(leaks.max()) if leaks.numel() else 1.0
    low = max(float(leaks.min()) if leaks.numel() else high / 10, high * 1e-8)
    norm = mpl.colors.LogNorm(min(low, high / 10), high, clip=True)
    scale = mpl.colors.LinearSegmentedColormap.from_list("leak", _LEAKS)

    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, norm, scale)
    if any(panel.leak > 0 for panel in panels):
        mappable = mpl.cm.ScalarMappable(norm, scale)
        label = "leak: influence that must not be there"
        number = mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}")
        bar = figure.colorbar(mappable, ax=list(grid), shrink=0.8, label=label, format=number)
        bar.locator = mpl.ticker.LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,))
        bar.minorticks_off()
        bar.ax.tick_params(labelsize=8)
    _legend(figure, panels)
    if title is not None:
        figure.suptitle(title)
    return figure


# ---- panels of plot_influence ------------------------------------------------------------------------------------


class _Panel:
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


def _attention_panels(report: AttentionReport) -> list[_Panel]:
    edges = _ends(report.documents, report.expected.shape[0]), _ends(report.documents_k, report.expected.shape[1])
    panels = [_Panel("expected", report.expected.double(), report.expected, report.expected, "query", "key")]
    panels[0].judged = False
    found = [("found by replacing keys", report.influence), ("found by gradients", report.gradient)]
    for title, matrix in found:
        if matrix is not None:
            panels.append(_Panel(title, matrix, report.expected, report.expected, "query", "key"))
    for panel in panels:
        panel.lines = edges
    return panels


def _panel(title: str, found: Found, expected: Tensor | None) -> _Panel:
    if isinstance(found, ProbeReport):
        # Replaced documents across, documents that answer down: the triangle of a causal leak lies as in the mask.
        itself = torch.eye(len(found.lengths), dtype=torch.bool)
        needed = itself & (torch.tensor(found.lengths) > 0)
        return _Panel(title, found.influence.T, itself, needed, "logits of document", "document replaced")
    if isinstance(found, AttentionReport):
        panel = _Panel(title, found.influence, found.expected, found.expected, "query", "key")
        panel.lines = (_ends(found.documents, panel.matrix.shape[0]), _ends(found.documents_k, panel.matrix.shape[1]))
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
    return _Panel(title, found.detach(), expected, expected, "sees", "is seen")


def _draw_panel(axes: Axes, panel: _Panel, norm: Any, scale: Any) -> None:
    import matplotlib as mpl

    matrix = panel.matrix
    height, width = matrix.shape
    image = torch.ones(height, width, 3, dtype=torch.float64)
    image[(matrix != 0) & panel.allowed] = torch.tensor(mpl.colors.to_rgb(_ALLOWED), dtype=torch.float64)
    leaks = (matrix != 0) & ~panel.allowed & ~matrix.isnan()
    if leaks.any():
        sizes = matrix[leaks].clamp(max=norm.vmax)
        image[leaks] = torch.tensor(scale(norm(sizes.numpy())), dtype=torch.float64)[:, :3]
    image[matrix.isnan()] = torch.tensor(mpl.colors.to_rgb(_PADDING), dtype=torch.float64)
    axes.imshow(image.numpy(), extent=(0, width, height, 0), interpolation="nearest")
    _cells(axes, height, width)
    for edge in panel.lines[0]:
        axes.axhline(edge, color=_LINE, linewidth=0.7)
    for edge in panel.lines[1]:
        axes.axvline(edge, color=_LINE, linewidth=0.7)
    missing = ((matrix == 0) & panel.required).nonzero() + 0.5
    if len(missing):
        size = max(8.0, min(60.0, 4000.0 / max(height, width)))
        axes.scatter(missing[:, 1].numpy(), missing[:, 0].numpy(), marker="x", s=size, color="black", linewidth=1)
    if max(height, width) <= _NUMBERS and not panel.lines[0]:
        for i, line in enumerate(matrix.tolist()):
            for j, value in enumerate(line):
                dark = bool(leaks[i, j]) and float(norm(min(value, norm.vmax))) > 0.6
                text = _short(value)
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", size=7, color="white" if dark else "black")
    _document_ticks(axes, panel, height, width)
    axes.set_ylabel(panel.seen_by)
    axes.set_xlabel(panel.seen)
    axes.set_title("\n".join(line for line in (panel.title, panel.verdict) if line), fontsize=10)


def _legend(figure: Figure | SubFigure, panels: list[_Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=_ALLOWED, label="must be there"),
        Patch(facecolor="white", edgecolor=_LINE, linewidth=0.5, label="none (exactly 0)"),
    ]
    if any(panel.leak > 0 for panel in panels):
        handles.append(Patch(facecolor=_LEAKS[2], label="leak"))
    if any(panel.blind for panel in panels):
        handles.append(Line2D([], [], marker="x", color="black", linestyle="", markersize=5, label="missing"))
    if any(panel.matrix.isnan().any() for panel in panels):
        handles.append(Patch(facecolor=_PADDING, label="not measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _document_ticks(axes: Axes, panel: _Panel, height: int, width: int) -> None:
    if panel.lines[0] or max(height, width) > 24:
        _whole_ticks(axes)
        return
    axes.set_xticks([j + 0.5 for j in range(width)], [str(j) for j in range(width)], fontsize=8)
    axes.set_yticks([i + 0.5 for i in range(height)], [str(i) for i in range(height)], fontsize=8)
    axes.tick_params(length=0)


def _short(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.2g}"


def _ends(documents: Spans, total: int) -> list[int]:
    """Where documents begin and end, but for the ends of the row."""
    return sorted({edge for span in documents if span[0] < span[1] for edge in span if 0 < edge < total})


# ---- parts of plot_mask ------------------------------------------------------------------------------------------


def _sample(total: int) -> Tensor:
    """The rows or columns that become pixels: all of them, or the middle of equal parts."""
    pixels = min(total, _PIXELS)
    return ((torch.arange(pixels, dtype=torch.float64) + 0.5) * total / pixels).long()


def _edges(packing: Packing) -> list[int]:
    """Where one document, or run of padding, meets the next."""
    changes = packing.segment_ids[1:] != packing.segment_ids[:-1]
    return [int(edge) + 1 for edge in changes.nonzero().flatten()]


def _cells(axes: Axes, height: int, width: int) -> None:
    """Outlines of single cells, where there are few."""
    if max(height, width) > _GRID:
        return
    style: dict[str, Any] = {"color": "#E6E6E6", "linewidth": 0.5}
    axes.hlines(range(1, height), 0, width, **style)
    axes.vlines(range(1, width), 0, height, **style)


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


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
            color=_LINE,
            annotation_clip=False,
        )


def _positions(strip: Axes, packing: Packing) -> None:
    """Positions over the row, a saw tooth per document."""
    columns = _sample(packing.total)
    positions = packing.position_ids[columns].double()
    # A gap where the next document begins: no line falls from the end of one to the start of the other.
    segment = packing.segment_ids[columns]
    starts = torch.zeros_like(segment, dtype=torch.bool)
    starts[1:] = (segment[1:] != segment[:-1]) | (positions[1:] <= positions[:-1])
    x, y = (columns + 0.5).double(), positions
    if packing.total <= _GRID:
        strip.plot(x.numpy(), y.numpy(), ".", color=_LINE, markersize=4)
    pieces = torch.nonzero(starts).flatten().tolist()
    for first, last in zip([0, *pieces], [*pieces, len(columns)], strict=True):
        style: dict[str, Any] = {"color": "#999999", "linewidth": 1.0, "linestyle": ":"}
        if segment[first] >= 0:
            style = {"color": _DOCUMENTS[int(segment[first]) % len(_DOCUMENTS)], "linewidth": 1.5}
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


def _figure(figure: Figure | SubFigure | None, size: tuple[float, float]) -> Figure | SubFigure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('packattn.plotting needs matplotlib: pip install "packattn[plot]"') from error
    return Figure(figsize=size, layout="constrained") if figure is None else figure
