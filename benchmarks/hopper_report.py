#!/usr/bin/env python
"""What the main loops of the sm_90a kernels issue, and how much of the tensor cores' rate that leaves them at most.

    python benchmarks/hopper_report.py [--library FILE ...] [--json FILE] [--write]

For every Hopper kernel without soft cap: one round of the loop without mask code, of one warpgroup over one block of
keys (or of queries): instructions issued, products by shape, and the clocks of each resource by the model of
hopper_model.py. A library may also be a cubin. "busy": the part of the time that the tensor cores can work; "useful":
the same for products that a single pass over the scores needs (2 in the forward, 5 in the backward, which computes 7 in
two kernels). "exposed": instructions that are issued while no product of the same warpgroup is pending, beside which
another warpgroup's must run.

Exit status 1 if one of these does not hold, 2 if a tool or a library is missing:
    the forward issues at most 460 instructions at head dim 64 and 530 at 128;
    every exponential is issued while a product of its warpgroup is pending (the product that it is to overlap with);
    no product waits for the one before (as ptxas has it where it serialises wgmma);
    at head dim 128 the useful products reach at least 85 % of the tensor cores' rate in the forward, and 70 % in the
    backward.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import cubin
import documents
import hopper_model
import sass
import shapes
from packattn.cli import tables
from sass_report import DTYPES

ARCH = "sm_90a"
PASSES = {
    "hopper_forward_kernel": "forward",
    "hopper_backward_keys": "backward, dK dV",
    "hopper_backward_query": "backward, dQ",
}
DIRECTIONS = ["forward", "forward, few rows", "backward"]
MOST_ISSUED = {("forward", 64, 64): 460, ("forward", 128, 128): 530}
LEAST_USEFUL = {("forward", 128, 128): 0.85, ("backward", 128, 128): 0.70}


def computed_columns(base: str, s: dict[str, int]) -> int:
    """Columns over which products are computed for each pair of a query row and a key; D and Dv are the tiles'.

    S = Q K^T and O += P V; S, dP = dO V^T and dQ += dS K; S, dP, dV += P^T dO and dK += dS^T Q, of which kPass may
    leave out dP and dK (1) or dV (2).
    """
    d, dv = s["D"], s["DV"]
    if base == "hopper_forward_kernel":
        return d + dv
    if base == "hopper_backward_query":
        return 2 * d + dv
    return {0: 2 * d + 2 * dv, 1: d + dv, 2: 2 * d + dv}[s.get("kPass", 0)]


def useful_columns(direction: str, d: int, dv: int) -> int:
    return 3 * d + 2 * dv if direction == "backward" else d + dv


def stage_bytes(s: dict[str, int]) -> int:
    return s["kStageBytes"] if "kStageBytes" in s else s["kKeyBytes"] + s["kValueBytes"]


def main_loop(program: sass.Program, flops: float) -> tuple[sass.Round, int]:
    """(The loop with the fewest instructions a block among those whose products are those of whole blocks, its blocks.)

    flops: of one warpgroup over one block.
    """
    found = []
    for _, round_ in program.leaves():
        done = sum(p.flops * n for p, n in hopper_model.products(round_.path).items())
        blocks, rest = divmod(done, flops)
        if blocks and not rest:
            found.append((round_.issued / blocks, round_, int(blocks)))
    if not found:
        raise cubin.MissingTool(f"no loop with {flops:.0f} flops, a warpgroup's part of one block, was found")
    _, round_, blocks = min(found, key=lambda f: f[0])
    return round_, blocks


def rows_of(library: Path, arch: str | None = ARCH) -> list[dict[str, Any]]:
    """One row for each Hopper kernel without soft cap."""
    found = [k for k in cubin.kernels(library, arch) if k.base in PASSES and k.name.split("(")[0].endswith("false>")]
    constants = shapes.read(k.shape for k in found)
    rows = []
    for kernel in found:
        s = constants[kernel.shape]
        pairs = s["kRows"] * s["kKeys"]
        flops = 2.0 * pairs * computed_columns(kernel.base, s) / s["kConsumers"]
        try:
            round_, blocks = main_loop(sass.Program(cubin.machine_code(library, kernel.arch, kernel.mangled)), flops)
        except cubin.MissingTool as error:
            raise cubin.MissingTool(f"{kernel.name}: {error}") from None
        direction = PASSES[kernel.base].split(",")[0] + (", few rows" if s.get("kStacked") else "")
        part = PASSES[kernel.base].partition(", ")[2] + {0: "", 1: ": dV", 2: ": dK"}[s.get("kPass", 0)]
        exposed = hopper_model.waits(round_.path)
        used = hopper_model.products(round_.path)
        clocks = hopper_model.clocks(round_.path, s["kConsumers"], stage_bytes(s), blocks)
        rows.append(
            {
                "direction": direction,
                "part": part,
                "head_dim": s["D"],
                "head_dim_v": s["DV"],
                "dtype": next(d for name, d in DTYPES.items() if re.search(rf"\b{name}\b", kernel.name)),
                "rows": s["kRows"],
                "keys": s["kKeys"],
                "consumers": s["kConsumers"],
                "issued": round_.issued / blocks,
                "products": {str(p): n // blocks for p, n in used.items()},
                "groups": sum("gsb0" in i.text for i in round_.path if i.name in sass.TENSOR_CORE) / blocks,
                "exponentials": round_.opcodes["MUFU.EX2"] / blocks,
                "exposed_exponentials": exposed.exposed_exponentials / blocks,
                "exposed": exposed.exposed / blocks,
                "clocks": clocks,
                "bound": max(clocks, key=lambda name: clocks[name]),
                "busy": clocks["tensor"] / max(clocks.values()),
                "pairs": pairs,
                "opcodes": dict(round_.opcodes.most_common()),
            }
        )
    return sorted(rows, key=order)


def order(row: dict[str, Any]) -> tuple[int, int, str, int, str]:
    parts = ["", "dK dV", "dQ"]
    part = parts.index(row["part"].split(":")[0])
    return DIRECTIONS.index(row["direction"]), part, row["dtype"], row["head_dim"], row["part"]


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a direction one after the other over the same pairs; one row for each head dims and dtype."""
    found = []
    keys = dict.fromkeys((r["direction"], r["head_dim"], r["head_dim_v"], r["dtype"]) for r in rows)
    for direction, d, dv, dtype in keys:
        group = [
            r for r in rows if (r["direction"], r["head_dim"], r["head_dim_v"], r["dtype"]) == (direction, d, dv, dtype)
        ]
        taken = sum(max(r["clocks"].values()) * r["consumers"] / r["pairs"] for r in group)
        tensor = sum(r["clocks"]["tensor"] * r["consumers"] / r["pairs"] for r in group)
        needed = 2.0 * useful_columns(direction, d, dv) / hopper_model.TENSOR
        found.append(
            {
                "direction": direction,
                "head_dim": d,
                "head_dim_v": dv,
                "dtype": dtype,
                # One of two kernels would look like the whole backward, and a fast one.
                "complete": direction != "backward" or {"dK dV", "dQ"} <= {r["part"].split(":")[0] for r in group},
                "computed": tensor / needed,
                "busy": tensor / taken,
                "useful": needed / taken,
                "tflops": hopper_model.PEAK * needed / taken,
                "bounds": list(dict.fromkeys(r["bound"] for r in group)),
            }
        )
    return found


def faults(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for r in rows:
        name = f"{title(r)}, {heads(r)}, {r['dtype']}"
        most = MOST_ISSUED.get((r["direction"], r["head_dim"], r["head_dim_v"]))
        if most is not None and r["issued"] > most:
            found.append(f"{name}: {r['issued']:.0f} instructions a block, at most {most} were wanted")
        if r["exposed_exponentials"]:
            found.append(
                f"{name}: {r['exposed_exponentials']:.0f} of {r['exponentials']:.0f} exponentials are issued while no "
                "product is pending"
            )
        if r["groups"] == sum(r["products"].values()):
            found.append(f"{name}: every product is a group of its own, as where ptxas serialises them")
    for t in totals(rows):
        least = LEAST_USEFUL.get((t["direction"], t["head_dim"], t["head_dim_v"]))
        if least is not None and t["complete"] and t["useful"] < least:
            found.append(
                f"{t['direction']}, {heads(t)}, {t['dtype']}: useful products reach {t['useful']:.1%} of the tensor "
                f"cores' rate at most ({', '.join(t['bounds'])}), {least:.0%} were wanted"
            )
    return found


def title(row: dict[str, Any]) -> str:
    return f"{row['direction']}, {row['part']}" if row["part"] else str(row["direction"])


def heads(row: dict[str, Any]) -> str:
    return str(row["head_dim"]) if row["head_dim"] == row["head_dim_v"] else f"{row['head_dim']}/{row['head_dim_v']}"


def loops_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["", "head dims", "rows x keys", "products", *hopper_model.RESOURCES, "exposed", "bound by", "busy"]
    cells = []
    for r in rows:
        used = ", ".join(f"{n} {name}" for name, n in r["products"].items())
        clocks = [f"{r['clocks'][name]:.0f}" for name in hopper_model.RESOURCES]
        tile = f"{r['rows']} x {r['keys']}"
        cells.append([title(r), heads(r), tile, used, *clocks, f"{r['exposed']:.0f}", r["bound"], f"{r['busy']:.0%}"])
    return header, cells


def totals_table(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["", "head dims", "computed / useful", "busy", "useful", f"TFLOP/s of {hopper_model.PEAK:.0f}", "bound by"]
    return header, [
        [
            t["direction"],
            heads(t),
            f"{t['computed']:.2f}",
            f"{t['busy']:.0%}",
            f"{t['useful']:.1%}",
            f"{t['tflops']:.0f}",
            ", ".join(t["bounds"]),
        ]
        for t in found
        if t["complete"]
    ]


def markdown(header: list[str], cells: list[list[str]], words: int) -> str:
    """words: how many of the first columns are text."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * words + "--:|" * (len(header) - words)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def write(rows: list[dict[str, Any]]) -> None:
    """Makes the tables of docs/cuda.md those of these rows, of bfloat16 (float16 has other products, else the same)."""
    chosen = [r for r in rows if r["dtype"] == "bfloat16"]
    parts = {
        "hopper-loops": markdown(*loops_table(chosen), words=4),
        "hopper-bounds": markdown(*totals_table(totals(chosen)), words=2),
    }
    documents.replace_blocks(cubin.ROOT / "docs" / "cuda.md", parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--library", type=Path, nargs="*", help="libraries or cubins (default: the one that is installed)"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/cuda.md")
    options = parser.parse_args()
    try:
        rows: list[dict[str, Any]] = []
        for library in options.library or [cubin.packattn_library()]:
            rows += rows_of(library, None if library.suffix == ".cubin" else ARCH)
        rows.sort(key=order)
        if not rows:
            raise cubin.MissingTool(f"there are no Hopper kernels for {ARCH} in it")
    except cubin.MissingTool as error:
        print(f"hopper_report: {error}", file=sys.stderr)
        return 2
    print("One round without masks: clocks for each warpgroup and block\n")
    header, cells = loops_table(rows)
    print(tables.render(["dtype", *header], [[r["dtype"], *c] for r, c in zip(rows, cells, strict=True)]))
    print("\nAt most, of the tensor cores' rate\n")
    found = [t for t in totals(rows) if t["complete"]]
    header, cells = totals_table(found)
    print(tables.render(["dtype", *header], [[t["dtype"], *c] for t, c in zip(found, cells, strict=True)]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(rows)
    wrong = faults(rows)
    print(f"\n{len(rows)} kernels, {len(wrong)} faults")
    for fault in wrong:
        print(f"FAULT: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
