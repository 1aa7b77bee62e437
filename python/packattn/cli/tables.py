"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def render(headers: Sequence[str], rows: Sequence[Sequence[object]], align: str = "", indent: int = 2) -> str:
    """Align columns under their headers. `align` has a letter per column, "<" or ">"; columns without one go left."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    align = align.ljust(len(headers), "<")

    def line(row: Sequence[str]) -> str:
        parts = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        return (" " * indent + "  ".join(parts)).rstrip()

    rule = " " * indent + "  ".join("-" * width for width in widths)
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def pairs(items: Sequence[tuple[str, object]], indent: int = 2) -> str:
    """One "name  value" line per item; a value with several lines stays in its column."""
    width = max(len(name) for name, _ in items)
    lines = []
    for name, value in items:
        first, *rest = str(value).splitlines() or [""]
        lines.append(f"{'':{indent}}{name:<{width}}  {first}".rstrip())
        lines.extend(f"{'':{indent + width + 2}}{more}" for more in rest)
    return "\n".join(lines)


def count(number: float) -> str:
    """A whole number with thousands separators: 12,345."""
    return f"{number:,.0f}"


def scientific(value: float) -> str:
    """An error size: "0" only when it is exactly zero, otherwise two digits and the power of ten."""
    return "0" if value == 0 else f"{value:.1e}"
