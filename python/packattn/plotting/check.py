"""What check_model found: the verdicts, and which query saw which key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..verify.model_report import KeyInfluence, ModelReport
from .influence import Panel, draw_panels, ends
from .style import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = {"ok": "#9ecae1", "rounding": "#9ecae1", "leaks": "#fd8d3c", "differs": "#fdd0a2", "not run": "#eeeeee"}
_COLUMNS = 4  # panels side by side


def plot_check(report: ModelReport, *, figure: Figure | SubFigure | None = None) -> Figure | SubFigure:
    """Draws a report of :func:`packattn.verify.check_model`.

    Above, a cell for every implementation and way of calling: blue keeps documents apart, orange leaks (with the size of
    the leak) or differs, grey was not run. Below, if the report has ``keys``: which query sees which key, expected and
    found, of every implementation the first way and the one that leaks most, coloured as by :func:`plot_influence`.

    Args:
        report: what check_model returned.
        figure: a Figure or SubFigure to draw into; the default is a new Figure.

    Returns:
        The figure that was drawn into.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: another report.
    """
    if not isinstance(report, ModelReport):
        raise TypeError(f"report must be what check_model returns, got {type(report).__name__}")
    names = list(dict.fromkeys(row.implementation for row in report.rows))
    ways = list(dict.fromkeys(row.way for row in report.rows))
    panels = _panels(report.keys)
    table = 1.2 + 0.36 * len(ways)
    height = 0.6 + 3.9 * -(-len(panels) // _COLUMNS) if panels else 0.0
    width = max(2.4 + 1.5 * len(names), 3.4 * min(len(panels), _COLUMNS) + 1.2 if panels else 0.0)
    figure = new_figure(figure, (width, table + height))
    if not panels:
        _draw_table(figure.subplots(), report, names, ways)
        return figure
    parts = figure.add_gridspec(2, 1, height_ratios=(table, height))
    _draw_table(figure.add_subfigure(parts[0]).subplots(), report, names, ways)
    below = figure.add_subfigure(parts[1])
    draw_panels(below, panels, min(len(panels), _COLUMNS))
    below.suptitle("which query sees which key (a key's token is replaced by another)", fontsize=10)
    return figure


def _panels(keys: tuple[KeyInfluence, ...]) -> list[Panel]:
    panels = []
    if keys:
        first = keys[0]
        panel = Panel(
            "expected\n(the documents alone)", first.expected.double(), first.expected, first.expected, "query", "key"
        )
        panel.judged = False
        panel.lines = (ends(first.documents, len(first.found)),) * 2
        panels.append(panel)
    for one in keys:
        panel = Panel(f"{one.implementation}\n{one.way}", one.found, one.expected, one.required, "query", "key")
        panel.lines = (ends(one.documents, len(one.found)),) * 2
        panels.append(panel)
    return panels


def _draw_table(axes: Axes, report: ModelReport, names: list[str], ways: list[str]) -> None:
    from matplotlib.patches import Rectangle

    for row in report.rows:
        x, y = names.index(row.implementation), ways.index(row.way)
        style: dict[str, Any] = {"color": _COLORS[row.verdict], "linewidth": 0}
        axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, **style))
        text = row.verdict if row.verdict != "leaks" else f"leaks {row.leak:.3g}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(ways)), ways)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(f"{report.model}: what replacing a document moves in the others", fontsize=10)
    for side in axes.spines.values():
        side.set_visible(False)
