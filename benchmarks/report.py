"""Reads rows of results: ratios to packattn, and the bars it should reach. No Torch in this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from configurations import CASES, DTYPES

Row = dict[str, Any]

BARS: list[tuple[str, str, list[str], list[float | None]]] = [
    # direction, against, dtypes, bar for documents of     4096  1024  256  64   8 tokens
    ("forward", "sdpa_loop", DTYPES, [1.0, 1.3, 1.5, 2.2, 6.0]),
    ("forward_backward", "sdpa_loop", ["float32"], [1.05, 1.55, 2.0, 3.0, 6.0]),
    ("forward_backward", "sdpa_loop", ["bfloat16"], [4.8, 4.8, 4.8, 4.8, 4.8]),
    ("forward", "flex", DTYPES, [1.7, 1.8, 2.0, 3.5, 5.0]),
    ("forward", "mm", DTYPES, [0.75, 0.7, 0.5, 0.3, None]),
    ("forward_backward", "mm", DTYPES, [0.8, 0.8, 0.6, 0.4, None]),
    ("forward", "mm_float32", ["bfloat16"], [0.75, 0.7, 0.5, 0.3, None]),
    ("forward_backward", "mm_float32", ["bfloat16"], [0.8, 0.8, 0.6, 0.4, None]),
]
"""Least ratio wanted, in one run. Times the peer's speed; for mm the fraction of its GFLOP/s (mm multiplies in the
row's dtype, mm_float32 in float32 whatever the row's dtype)."""

BAR_CASES = ["1x4096", "4x1024", "16x256", "64x64", "512x8"]

PEERS = ["sdpa_loop", "sdpa_padded", "sdpa_dense", "flex", "mm", "mm_float32"]


def grouped(rows: Iterable[Row]) -> dict[tuple[int, str, int, str, str, str], dict[str, Row]]:
    """(tokens, dtype, head_dim, heads, direction, case) -> implementation -> row."""
    groups: dict[tuple[int, str, int, str, str, str], dict[str, Row]] = {}
    for row in rows:
        key = (row["tokens"], row["dtype"], row["head_dim"], row["heads"], row["direction"], row["case"])
        groups.setdefault(key, {})[row["implementation"]] = row
    return groups


def ratio(group: dict[str, Row], peer: str) -> float | None:
    """How many times the peer's speed packattn reaches; for mm, the fraction of its GFLOP/s."""
    if "packattn" not in group or peer not in group:
        return None
    if peer.startswith("mm"):
        return group["packattn"]["useful_gflops"] / group[peer]["useful_gflops"]
    return group[peer]["median_ms"] / group["packattn"]["median_ms"]


def ratio_tables(rows: list[Row]) -> str:
    """One table for each (tokens, dtype, head_dim, heads, direction): packattn's speed and its ratio to each peer."""
    groups = grouped(rows)
    lines: list[str] = []
    for table in dict.fromkeys(key[:5] for key in groups):
        tokens, dtype, head_dim, heads, direction = table
        title = f"{direction}, {dtype}, {tokens} tokens, head dim {head_dim}, heads {heads}"
        lines += [
            "",
            title,
            "  " + " ".join(f"{name:>11}" for name in ["case", "ms", "GFLOP/s", *(f"/{p}" for p in PEERS)]),
        ]
        for case in CASES:
            group = groups.get((*table, case), {})
            ours = group.get("packattn")
            if ours is None:
                continue
            cells = [case, f"{ours['median_ms']:.2f}", f"{ours['useful_gflops']:.1f}"]
            cells += ["-" if (r := ratio(group, peer)) is None else f"{r:.2f}" for peer in PEERS]
            lines.append("  " + " ".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def bar_table(rows: list[Row]) -> str:
    """packattn's ratio and the bar for every bar a run has rows for, and how many are met.

    The bars are set for 4096 tokens and 8/8 heads; other rows are shown against the same numbers. mm_float32
    is shown and not counted.
    """
    groups = grouped(rows)
    lines = ["", "Bars: ratio reached / bar, * where missed", ""]
    head = f"  {'':52}" + "".join(f"{case:>15}" for case in BAR_CASES)
    counts = {True: [0, 0], False: [0, 0]}
    for table in dict.fromkeys((key[0], key[3]) for key in groups):
        tokens, heads = table
        counted = table == (4096, "8/8")
        body: list[str] = []
        for direction, peer, dtypes, bars in BARS:
            for dtype in dtypes:
                for head_dim in sorted({key[2] for key in groups if (key[0], key[3]) == table}):
                    cells = []
                    for case, bar in zip(BAR_CASES, bars, strict=True):
                        group = groups.get((tokens, dtype, head_dim, heads, direction, case), {})
                        reached = ratio(group, peer)
                        if bar is None or reached is None:
                            cells.append("-")
                            continue
                        if peer != "mm_float32":
                            counts[counted][0] += reached >= bar
                            counts[counted][1] += 1
                        cells.append(f"{reached:.2f}/{bar:g}{' ' if reached >= bar else '*'}")
                    if any(cell != "-" for cell in cells):
                        label = f"{direction} / {peer}, {dtype}, D={head_dim}"
                        body.append(f"  {label:52}" + "".join(f"{cell:>15}" for cell in cells))
        if body:
            lines += [f"{tokens} tokens, heads {heads}", head, *body, ""]
    if counts[True][1]:
        lines.append(f"{counts[True][0]} of {counts[True][1]} bars met (4096 tokens, heads 8/8)")
    if counts[False][1]:
        lines.append(f"{counts[False][0]} of {counts[False][1]} of the same numbers reached in the other rows")
    return "\n".join(lines)
