#!/usr/bin/env python
"""Registers, shared memory and spills of every CUDA kernel, and how many blocks of it a multiprocessor holds.

    python benchmarks/ptxas_report.py [--library FILE] [--arch sm_80 ...] [--json FILE] [--write-plan]

The figures are those of the built library (cuobjdump), nothing is compiled again; shared memory is what the kernels' own
headers say (shapes.py). Spilled registers lie in a kernel's stack frame, so a frame of 0 bytes means that none are.

Exit status 1 if a tensor-core kernel for head dims up to 128 spills, or any that uses wgmma; if a multiprocessor holds
fewer blocks than the plan in docs/cuda.md says (the table between the occupancy-plan comments there, which --write-plan
writes), or if the plan lacks a kernel; if the warpgroups of a block ask (setmaxnreg) for more registers than it is
launched with, for which they would wait forever; 2 if a tool or the library is missing.
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
import hopper_report
import shapes
from packattn.cli import tables
from sass_report import DTYPES, PASSES

WGMMA = {base: f"{name}, wgmma" for base, name in hopper_report.PASSES.items()}
ALL_PASSES = PASSES | WGMMA
FEW_ROWS = ", few rows"  # of the forward that is for short documents

DOCUMENT = cubin.ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- occupancy-plan -->\n", "<!-- /occupancy-plan -->"
# The columns of the plan: architectures whose multiprocessors have the same room.
CLASSES = {"8.0": ("sm_80",), "9.0, 10.0": ("sm_90", "sm_100"), "8.6, 8.9, 12.0": ("sm_86", "sm_89", "sm_120")}
NO_SPILLS_TO = 128  # head dims

Plan = dict[tuple[str, str, str], int]  # (pass, head dims, class) -> blocks


def class_of(arch: str) -> str | None:
    plain = arch.rstrip("af")
    return next((name for name, archs in CLASSES.items() if plain in archs), None)


def collect(library: Path, wanted: list[str] | None) -> list[dict[str, Any]]:
    """One row for each kernel and architecture."""
    kernels = [k for k in cubin.kernels(library) if not wanted or k.arch in wanted]
    constants = shapes.read(k.shape for k in kernels if k.base in ALL_PASSES)
    used = {
        (k.arch, k.mangled)
        for arch in {k.arch for k in kernels}
        for k in shapes.in_use([k for k in kernels if k.arch == arch and k.base in PASSES], constants, arch)
    }
    used |= {(k.arch, k.mangled) for k in kernels if k.base in WGMMA}  # one shape for each head dim and what it serves
    rows = []
    for kernel in kernels:
        shape = constants.get(kernel.shape, {})
        dtype = next((d for name, d in DTYPES.items() if re.search(rf"\b{name}\b", kernel.name)), "")
        threads = shape.get("kThreads")
        # From 9.0 on a kernel's figure has the 1 KiB that the system takes, which occupancy() counts for all.
        reserved = 1024 if int(re.sub(r"\D", "", kernel.arch)) >= 90 else 0
        shared = max(0, kernel.shared - reserved) + shape.get("kSharedBytes", 0)
        rows.append(
            {
                "kernel": kernel.base,
                "pass": ALL_PASSES.get(kernel.base, "") + (FEW_ROWS if shape.get("kStacked") else ""),
                "arguments": kernel.arguments(),
                "arch": kernel.arch,
                "dtype": dtype,
                "head_dim": shape.get("D"),
                "head_dim_v": shape.get("DV"),
                "threads": threads,
                "registers": kernel.registers,
                "wanted_registers": warpgroup_registers(shape),
                "stack": kernel.stack,
                "shared": shared,
                "blocks": shapes.occupancy(kernel.arch, threads, kernel.registers, shared) if threads else None,
                "used": (kernel.arch, kernel.mangled) in used if kernel.base in ALL_PASSES else None,
            }
        )
    return sorted(
        rows, key=lambda r: (r["arch"], r["kernel"], r["head_dim"] or 0, r["head_dim_v"] or 0, r["arguments"])
    )


def warpgroup_registers(shape: dict[str, int]) -> int:
    """Of all threads of a block that shares registers out among its warpgroups; 0 where each keeps what it has."""
    if "kConsumerRegisters" not in shape:
        return 0
    return 128 * (shape["kCopierRegisters"] + shape["kConsumers"] * shape["kConsumerRegisters"])


def head_dims(row: dict[str, Any]) -> str:
    d, dv = row["head_dim"], row["head_dim_v"]
    return str(d) if d == dv else f"{d}/{dv}"


def read_plan() -> Plan:
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    if BEGIN not in text:
        return {}
    plan: Plan = {}
    for line in text.split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 2 + len(CLASSES) or not any(re.match(r"\d", cell) for cell in cells[2:]):
            continue
        for name, cell in zip(CLASSES, cells[2:], strict=True):
            if found := re.match(r"(\d+) x", cell):
                plan[cells[0], cells[1], name] = int(found[1])
    return plan


def write_plan(rows: list[dict[str, Any]]) -> None:
    """The table of docs/cuda.md, from what was compiled: "blocks x warps, KiB of one block"."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        where = class_of(row["arch"])
        if not row["used"] or where is None:
            continue
        cell = f"{row['blocks']} x {row['threads'] // 32} warps, {row['shared'] / 1024:.0f} KiB"
        line = found.setdefault((row["pass"], head_dims(row)), {})
        # dtypes and soft cap: the least of them is what is promised
        if where not in line or int(line[where].split()[0]) > row["blocks"]:
            line[where] = cell
    lines = [f"| | head dims | {' | '.join(CLASSES)} |", "|---|---|" + "---|" * len(CLASSES)]
    order = list(ALL_PASSES.values())
    order = [name + few for name in order for few in ("", FEW_ROWS)]
    for (name, dims), cells in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        lines.append(f"| {name} | {dims} | {' | '.join(cells.get(c, '-') for c in CLASSES)} |")
    documents.replace_blocks(DOCUMENT, {"occupancy-plan": "\n".join(lines)})


def faults(rows: list[dict[str, Any]], plan: Plan) -> list[str]:
    found = []
    for row in rows:
        if row["used"] is None or not row["pass"]:
            continue
        name = f"{row['arch']} {row['kernel']}<{row['arguments']}>"
        wgmma = row["kernel"] in WGMMA
        if row["stack"] and (wgmma or max(row["head_dim"], row["head_dim_v"]) <= NO_SPILLS_TO):
            found.append(f"{name} has a stack frame of {row['stack']} bytes; none was wanted")
        if wgmma and row["wanted_registers"] > row["registers"] * row["threads"]:
            found.append(
                f"{name}: its warpgroups ask for {row['wanted_registers']} registers, it is launched with "
                f"{row['registers']} x {row['threads']}"
            )
        where = class_of(row["arch"])
        if not row["used"] or where is None:
            continue
        planned = plan.get((row["pass"], head_dims(row), where))
        if planned is None:
            found.append(f"{name}: docs/cuda.md plans nothing for {row['pass']}, {head_dims(row)} on {where}")
        elif row["blocks"] < planned:
            found.append(f"{name}: {row['blocks']} blocks on a multiprocessor, docs/cuda.md plans {planned}")
    return found


def show(rows: list[dict[str, Any]]) -> str:
    header = ["arch", "kernel", "arguments", "threads", "registers", "stack", "shared", "blocks", "used"]
    cells = [
        [
            row["arch"],
            row["kernel"],
            row["arguments"],
            str(row["threads"] or ""),
            str(row["registers"]),
            str(row["stack"]),
            f"{row['shared']:,}",
            "" if row["blocks"] is None else str(row["blocks"]),
            {True: "yes", False: "no", None: ""}[row["used"]],
        ]
        for row in rows
    ]
    return tables.render(header, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="packattn's CUDA library (default: the one that is installed)")
    parser.add_argument("--arch", nargs="*", help="only these architectures (sm_80); default: all that were built")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--write-plan", action="store_true", help="make the plan of docs/cuda.md what was compiled")
    options = parser.parse_args()
    try:
        rows = collect(options.library or cubin.packattn_library(), options.arch)
    except cubin.MissingTool as error:
        print(f"ptxas_report: {error}", file=sys.stderr)
        return 2
    print(show(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.write_plan:
        write_plan(rows)
    found = faults(rows, read_plan())
    print(f"\n{len(rows)} kernels; 'used' is whether the head dims' calls take these tiles on that architecture")
    for fault in found:
        print(f"FAULT: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
