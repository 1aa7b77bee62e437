#!/usr/bin/env python3
"""Rewrites what README quotes from runs: the benchmark table, and the end of what `packattn demo` prints.

    python benchmarks/readme_table.py benchmarks/results/cpu.json
    packattn demo | tee demo.log; python benchmarks/readme_table.py --demo demo.log

Each stands between a pair of comments, `<!-- benchmark-table -->` and `<!-- /benchmark-table -->` for example.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from configurations import CASES, DTYPES
from documents import replace_blocks
from report import Row, grouped, ratio

ROOT = Path(__file__).resolve().parent.parent
TOKENS, HEADS, HEAD_DIM = 4096, "8/8", 64
COLUMNS = [
    # direction, peer; None is packattn's own time
    ("forward", None),
    ("forward", "sdpa_loop"),
    ("forward", "sdpa_padded"),
    ("forward", "sdpa_dense"),
    ("forward", "flex"),
    ("forward_backward", None),
    ("forward_backward", "sdpa_loop"),
    ("forward_backward", "sdpa_padded"),
    ("forward_backward", "sdpa_dense"),
]


def table(rows: list[Row]) -> str:
    """Markdown: one line for each dtype and case, times in ms and speed relative to each peer."""
    groups = grouped(rows)
    first = rows[0]
    machine = (
        f"{first['cpu']}, {first['threads']} threads, {first['date']}; packattn {first['packattn']} "
        f"({first['isa']} kernels), torch {first['torch']} ({first['torch_isa']}), Python {first['python']}. "
        f"{TOKENS} tokens, {HEADS} heads, head dim {HEAD_DIM}. ms is packattn's time, ×name how many times as "
        "fast as that implementation it is."
    )
    lines = [
        machine,
        "",
        "| | fwd ms | ×loop | ×padded | ×dense | ×flex | fwd+bwd ms | ×loop | ×padded | ×dense |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for dtype in DTYPES:
        for case in CASES:
            cells = []
            for direction, peer in COLUMNS:
                group = groups.get((TOKENS, dtype, HEAD_DIM, HEADS, direction, case), {})
                if peer is None:
                    cells.append(f"{group['packattn']['median_ms']:.2f}" if "packattn" in group else "")
                else:
                    reached = ratio(group, peer)
                    cells.append("" if reached is None else f"{reached:.2f}" if reached < 10 else f"{reached:.0f}")
            if any(cells):
                lines.append(f"| {dtype} {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def demo_output(printed: str) -> str:
    """The demo's output from its timings on, in a fence."""
    at = printed.find("\n4. ")
    if at < 0:
        raise SystemExit("the file does not hold the whole output of `packattn demo`")
    return f"```text\n{printed[at:].strip()}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="rows of bench_attention.py")
    parser.add_argument("--demo", type=Path, help="what packattn demo printed")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    blocks = {}
    if options.results:
        blocks["benchmark-table"] = table(json.loads(options.results.read_text()))
    if options.demo:
        blocks["demo-output"] = demo_output(options.demo.read_text(encoding="utf-8"))
    replace_blocks(options.readme, blocks)


if __name__ == "__main__":
    main()
