#!/usr/bin/env python3
"""Draws docs/images/benchmark-cpu.png from the rows bench_attention.py wrote.

python benchmarks/plot_results.py benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from configurations import CASES, DIRECTIONS, DTYPES
from report import Row, grouped

ROOT = Path(__file__).resolve().parent.parent
SERIES = [
    # implementation, label, colour (distinct in grey and for colour-blind readers)
    ("packattn", "packattn", "#0b5394"),
    ("sdpa_padded", "SDPA, documents padded to the longest", "#76a5d8"),
    ("flex", "FlexAttention, compiled", "#e69138"),
    ("sdpa_dense", "SDPA, dense document mask", "#b7b7b7"),
]
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "benchmark-cpu.png")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", default="8/8")
    options = parser.parse_args()

    rows = json.loads(options.results.read_text())
    groups = grouped(rows)
    chosen = {
        (dtype, direction): {
            case: groups[key]
            for case in CASES
            if "sdpa_loop"
            in groups.get(key := (options.tokens, dtype, options.head_dim, options.heads, direction, case), {})
        }
        for dtype in DTYPES
        for direction in DIRECTIONS
    }
    dtypes = [dtype for dtype in DTYPES if any(chosen[dtype, direction] for direction in DIRECTIONS)]
    if not dtypes:
        raise SystemExit("no rows with these tokens, head dim and heads hold sdpa_loop to compare with")

    figure, axes = plt.subplots(
        len(dtypes),
        len(DIRECTIONS),
        figsize=(11, 0.8 + 3.1 * len(dtypes)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, direction in zip(line, DIRECTIONS, strict=True):
            draw(axis, chosen[dtype, direction])
            axis.set_title(f"{TITLES[direction]}, {dtype}", fontsize=10)
        line[0].set_ylabel("speed / SDPA document by document", fontsize=8)
    handles = [Patch(color=colour, label=label) for _, label, colour in SERIES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(
        f"Causal attention inside packed documents: {options.tokens} tokens, heads {options.heads}, "
        f"head dim {options.head_dim}\n{machine(rows)}",
        fontsize=10,
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=150)
    print(options.output)


def draw(axis: Axes, cases: dict[str, dict[str, Row]]) -> None:
    """Bars grouped by case, from 1 (as fast as SDPA called once per document) up where faster, down where slower."""
    width = 0.8 / len(SERIES)
    axis.set_yscale("log")
    for s, (name, _, colour) in enumerate(SERIES):
        at, heights = [], []
        for c, group in enumerate(cases.values()):
            if name in group:
                at.append(c + (s + 0.5) * width - 0.4)
                heights.append(group["sdpa_loop"]["median_ms"] / group[name]["median_ms"])
        axis.bar(at, [height - 1 for height in heights], width * 0.92, bottom=1, color=colour, zorder=2)
        if name == "packattn":
            for x, height in zip(at, heights, strict=True):
                axis.text(x, max(height, 1) * 1.08, f"{height:.1f}", fontsize=8, ha="center", zorder=4)
    axis.axhline(1, color="black", linewidth=0.8, zorder=3)
    axis.set_yticks([0.01, 0.1, 1, 10], ["1/100", "1/10", "1", "10"])
    axis.margins(y=0.12)
    axis.set_xticks(range(len(cases)), cases, fontsize=9)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def machine(rows: list[Row]) -> str:
    row = rows[0]
    return (
        f"{row['cpu']}, {row['threads']} threads, packattn {row['packattn']} ({row['isa']}), "
        f"torch {row['torch']} ({row['torch_isa']}), {row['date']}"
    )


if __name__ == "__main__":
    main()
