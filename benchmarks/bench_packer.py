"""Times packattn.pack on document lengths like those of real corpora, after checking that it packs every token once.

    python benchmarks/bench_packer.py [--documents N] [--capacity C] [--json FILE]

The unit is the time that numpy takes to sort the same lengths, numpy.argsort(kind="stable"): it makes the numbers of
different machines comparable. Timings are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

import packattn

ALGORITHMS = ("bfd", "bfd_split", "ffd", "next_fit", "balanced")


def lognormal_lengths(documents: int, seed: int = 0) -> np.ndarray:
    """[documents] int64, 8 to 4096 tokens, median about 400: the long tail of a text corpus."""
    lengths = np.random.RandomState(seed).lognormal(6.0, 0.9, documents)
    return np.clip(lengths, 8, 4096).astype(np.int64)


def verify(bins: packattn.Bins, lengths: np.ndarray, capacity: int) -> None:
    """Every token in exactly one bin, and no bin over capacity; raises AssertionError."""
    in_order = np.lexsort((bins.starts, bins.items))
    items, starts, sizes = bins.items[in_order], bins.starts[in_order], bins.lengths[in_order]
    first = np.flatnonzero(np.diff(items, prepend=-1))
    assert (items[first] == np.arange(len(lengths))).all(), "a document is missing"
    assert (np.add.reduceat(sizes, first) == lengths).all(), "a document lost or gained tokens"
    continued = np.diff(items, prepend=-1) == 0
    assert (starts == np.where(continued, np.roll(starts + sizes, 1), 0)).all(), "fragments overlap or leave a gap"
    assert (bins.tokens <= capacity).all(), "a bin is over capacity"


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE too")
    arguments = parser.parse_args()

    lengths, capacity = lognormal_lengths(arguments.documents), arguments.capacity
    overflow = "error" if lengths.max() <= capacity else "split"
    packed = {
        a: packattn.pack(lengths, capacity, a, overflow=None if a == "bfd_split" else overflow) for a in ALGORITHMS
    }
    for bins in packed.values():
        verify(bins, lengths, capacity)

    runs: dict[str, Callable[[], object]] = {"numpy.argsort": lambda: np.argsort(lengths, kind="stable")}
    for name in ALGORITHMS:
        keyword = None if name == "bfd_split" else overflow
        runs[name] = lambda name=name, keyword=keyword: packattn.pack(lengths, capacity, name, overflow=keyword)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))

    sort = statistics.median(times["numpy.argsort"])
    print(f"{arguments.documents} documents of {lengths.min()} to {lengths.max()} tokens, capacity {capacity}")
    print(f"{'algorithm':<14} {'ms':>8} {'x argsort':>10} {'bins':>9} {'fill':>7} {'cost: std/mean':>15}")
    rows = []
    for name, taken in times.items():
        median = statistics.median(taken)
        row = {"algorithm": name, "documents": len(lengths), "capacity": capacity, "median_ms": 1e3 * median}
        text = f"{name:<14} {1e3 * median:>8.1f} {median / sort:>10.2f}"
        if name in packed:
            bins = packed[name]
            spread = float(bins.costs.std() / bins.costs.mean())
            row |= {"ratio_to_argsort": median / sort, "bins": bins.num_bins, "fill": bins.fill, "cost_spread": spread}
            text += f" {bins.num_bins:>9} {bins.fill:>7.4f} {spread:>15.3f}"
        rows.append(row)
        print(text)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
