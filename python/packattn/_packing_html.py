"""A Packing in a notebook: a few numbers and a bar with its documents. Needs no library; bounded, however many documents."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .packing import Packing

_WIDTH, _HEIGHT = 720, 28  # pixels of the bar
_SINGLE = 160  # documents up to which each has a rectangle and says its length where the mouse points
_COLUMNS = 240  # of a bar with more of them: each shows the document in its middle


def packing_html(packing: Packing) -> str:
    """HTML with an inline SVG, at most some 20 kB."""
    from .plotting.style import DOCUMENTS, PADDING

    here = packing.to("cpu")
    lengths = here.lengths.tolist()
    filled = [n for n in lengths if n]
    padding = int(here.is_padding.sum())
    facts = {
        "documents": f"{len(lengths):,}"
        + (f" ({len(lengths) - len(filled):,} empty)" if len(filled) < len(lengths) else ""),
        "tokens": f"{here.total:,}",
        "padding": f"{padding:,}" + (f" ({padding / here.total:.1%})" if padding else ""),
        "longest": f"{max(filled, default=0):,}",
        "mean": f"{sum(filled) / len(filled):,.1f}" if filled else "0",
        "device": str(packing.device),
    }
    cell = "padding:2px 10px;text-align:left"
    head = "".join(f'<th style="{cell}">{html.escape(name)}</th>' for name in facts)
    body = "".join(f'<td style="{cell}">{html.escape(value)}</td>' for value in facts.values())
    table = f"<thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody>"
    parts = [f'<div class="packattn-packing"><b>Packing</b><table style="border-collapse:collapse">{table}</table>']
    if here.total:
        parts.append(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'role="img" aria-label="the documents of the row"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="{PADDING}"/>'
        )
        parts += _single(here, DOCUMENTS) if len(filled) <= _SINGLE else _sampled(here, DOCUMENTS)
        parts.append("</svg>")
    return "".join([*parts, "</div>"])


def _single(packing: Packing, colors: tuple[str, ...]) -> list[str]:
    scale = _WIDTH / packing.total
    found = []
    for number, rows in enumerate(packing.documents()):
        size = rows.stop - rows.start
        if not size:
            continue
        # A gap of a pixel between neighbours, where there is room for one.
        width = max(size * scale - (1 if size * scale > 3 else 0), 0.1)
        found.append(
            f'<rect x="{rows.start * scale:.2f}" width="{width:.2f}" height="{_HEIGHT}" fill="{colors[number % len(colors)]}">'
            f"<title>document {number}: {size} {'token' if size == 1 else 'tokens'}, from {rows.start}</title></rect>"
        )
    return found


def _sampled(packing: Packing, colors: tuple[str, ...]) -> list[str]:
    width, found = _WIDTH / _COLUMNS, []
    for column in range(_COLUMNS):
        number = int(packing.segment_ids[int((column + 0.5) * packing.total / _COLUMNS)])
        if number >= 0:
            color = colors[number % len(colors)]
            found.append(f'<rect x="{column * width:.2f}" width="{width:.2f}" height="{_HEIGHT}" fill="{color}"/>')
    return found
