"""Compares two outputs of the conformance program, of a GPU and of the emulator.

    python tests/emulator/conformance.py on_gpu.txt emulated.txt

Exit status 1 if a line differs, or none is in both. Lines that only one of them has (a GPU that is no Hopper) are
counted, not judged.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path


def lines(path: str) -> dict[str, list[str]]:
    """Name of the line -> its kind and values."""
    found = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        kind, *rest = line.split()
        values = 1 if kind == "exact" else next(i for i, word in enumerate(reversed(rest)) if _is_name(word))
        found[" ".join([kind, *rest[:-values]])] = rest[-values:]
    return found


def _is_name(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return True
    return False


def difference(name: str, first: list[str], second: list[str]) -> str:
    """What is wrong; "" if the lines agree."""
    if name.startswith("exact"):
        return "" if first == second else f"{first[0]} and {second[0]}"
    relative, absolute = map(float, first[:2])
    for i, (a, b) in enumerate(zip(first[2:], second[2:], strict=True)):
        x, y = float(a), float(b)
        same = a == b or (math.isnan(x) and math.isnan(y))  # infinities are equal as text
        if not same and not abs(x - y) <= absolute + relative * abs(y):
            return f"value {i}: {a} and {b}"
    return ""


def main() -> int:
    first, second = lines(sys.argv[1]), lines(sys.argv[2])
    wrong = 0
    for name in first:
        if name in second and (what := difference(name, first[name], second[name])):
            wrong += 1
            print(f"{name}: {what}")
    both = len(first.keys() & second.keys())
    print(f"{both} lines compared, {wrong} differ; {len(first) - both} and {len(second) - both} in one output only")
    return int(wrong > 0 or both == 0)


if __name__ == "__main__":
    sys.exit(main())
