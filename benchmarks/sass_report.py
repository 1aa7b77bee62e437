#!/usr/bin/env python
"""How densely the main loops of the tensor-core kernels are packed with tensor-core instructions, beside FlashAttention-2.

    python benchmarks/sass_report.py [--library FILE] [--torch FILE] [--arch sm_80] [--json FILE] [--write]

For every kernel without soft cap: tensor-core instructions of one round of the main loop, all instructions that the round
issues, and their ratio. The same for the FlashAttention-2 kernels inside libtorch_cuda (namespace pytorch_flash) at the
same head dim and dtype, of which the densest counts: any tile size, causal or not, without dropout, ALiBi, soft cap and
local windows. What is counted is the same for both (sass.py): a full block in the middle of a document, which needs no
mask, with the copies of the block to come. "body" is what the loop holds in all, on any way.

Exit status 1 if a kernel of ours is less dense than the densest of FlashAttention-2 (192/128 is shown beside its head
dim 192, and not judged: it has no instantiation of that shape), 2 if a tool or a library is missing.

The ratio is no speed. It says how much room the other instructions leave: an SM issues one instruction a cycle for each
quarter, and an HMMA.16816 holds a quarter's tensor core for 8 cycles on an A100. Our backward computes the scores twice
(7 products where FlashAttention-2 has 5, without atomics), which no density shows; docs/cuda.md does that sum.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cubin
import documents
import roofline
import sass
import shapes
from packattn.cli import tables

DTYPES = {"bf16_t": "bfloat16", "f16_t": "float16"}
PASSES = {
    "attention_forward_kernel": "forward",
    "attention_backward_keys": "backward, dK dV",
    "attention_backward_query": "backward, dQ",
}
FLASH = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t"}


def tensor_core_instructions(base: str, s: dict[str, int]) -> int:
    """mma.m16n8k16 of one warp in one round over a block (sums of D and DV columns, shared by SPLIT warps)."""
    mt, d, dv = s["MT"], s["D"] // 16, s["DV"] // 16
    if base == "attention_forward_kernel":
        return mt * (s["kKeys"] // 8 * d + 2 * dv * (s["kKeys"] // 16))
    part, columns = s["kPart"] // 8, s["kColumns"] // 8
    steps = s["SLICE"] // 16
    scores = mt * part * (d + dv)
    if base == "attention_backward_keys":
        return (scores + mt * steps * (columns + s["kColumnsV"] // 8)) * (s["ROWS"] // s["SLICE"])
    return (scores + mt * steps * columns) * (s["KEYS"] // s["SLICE"])


def ours(library: Path, arch: str) -> list[dict[str, Any]]:
    """One row for each tensor-core kernel (without soft cap) that runs on this architecture."""
    found = [k for k in cubin.kernels(library, arch) if k.base in PASSES and k.name.split("(")[0].endswith("false>")]
    constants = shapes.read(k.shape for k in found)
    used = shapes.in_use(found, constants, arch)
    rows = []
    for kernel in found:
        s = constants[kernel.shape]
        if kernel not in used:
            continue
        dtype = next(d for name, d in DTYPES.items() if re.search(rf"\b{name}\b", kernel.name))
        wanted = tensor_core_instructions(kernel.base, s)
        round_ = sass.Program(cubin.machine_code(library, arch, kernel.mangled)).main_loop(wanted)
        if round_ is None:
            raise cubin.MissingTool(f"{kernel.name}: no loop with {wanted} tensor-core instructions was found")
        rows.append(
            {
                "pass": PASSES[kernel.base],
                "head_dim": s["D"],
                "head_dim_v": s["DV"],
                "dtype": dtype,
                "kernel": kernel.arguments(),
                "warps": s["kThreads"] // 32,
                "pairs": pairs(kernel.base, s),
                **numbers(round_),
            }
        )
    return sorted(
        rows, key=lambda r: (list(PASSES.values()).index(r["pass"]), r["dtype"], r["head_dim"], r["head_dim_v"])
    )


def pairs(base: str, s: dict[str, int]) -> int:
    """(query row, key) pairs that a block serves in one round."""
    if base == "attention_backward_keys":
        return s["kKeys"] * s["ROWS"]
    return s["kRows"] * (s["kKeys"] if base == "attention_forward_kernel" else s["KEYS"])


def numbers(round_: sass.Round) -> dict[str, Any]:
    return {
        "tensor_core": round_.tensor_core,
        "issued": round_.issued,
        "density": round_.density,
        "body": round_.whole,
        "opcodes": dict(round_.opcodes.most_common()),
    }


class Flash:
    """FlashAttention-2 inside libtorch_cuda."""

    def __init__(self, library: Path, arch: str) -> None:
        self.library, self.arch = library, arch
        mangled = [n for n in cubin.symbols(library, arch) if "pytorch_flash" in n]
        self.names = dict(zip(cubin.demangle(mangled), mangled, strict=True)) if mangled else {}
        self.known: dict[tuple[str, int, str], dict[str, Any] | None] = {}

    def densest(self, backward: bool, head_dim: int, dtype: str) -> dict[str, Any] | None:
        key = ("backward" if backward else "forward", head_dim, dtype)
        if key not in self.known:
            self.known[key] = self._densest(*key)
        return self.known[key]

    def _densest(self, direction: str, head_dim: int, dtype: str) -> dict[str, Any] | None:
        function = "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel" if direction == "backward" else "flash_fwd_kernel"
        # The switches: forward dropout, causal, local, ALiBi, even MN, even K, soft cap, returns softmax; the backward
        # has not the last.
        switches = re.compile(
            rf"{function}<Flash_\w+_kernel_traits<{head_dim}, (.*?), {FLASH[dtype]}.*> >, "
            r"(\w+), (\w+), (\w+), (\w+), (\w+), (\w+), (\w+)(?:, (\w+))?>\("
        )
        wanted: list[tuple[str, str]] = []
        for name, mangled in self.names.items():
            found = switches.search(name)
            if found is None:
                continue
            dropout, causal, local, alibi, _, _, softcap, returns = found.groups()[1:]
            if "true" in (dropout, local, alibi, softcap, returns):
                continue
            tile = " x ".join(found[1].split(", ")[:2]) + f", {found[1].split(', ')[2]} warps"
            wanted.append((mangled, tile + (", causal" if causal == "true" else "")))
        if not wanted:
            return None
        code = functions(cubin.machine_code(self.library, self.arch, ",".join(mangled for mangled, _ in wanted)))
        rows = []
        for mangled, tile in wanted:
            round_ = sass.Program(code[mangled]).main_loop()
            if round_ is not None:
                rows.append({"kernel": tile, **numbers(round_)})
        return max(rows, key=lambda r: r["density"], default=None)


def functions(text: str) -> dict[str, str]:
    """The parts of a dump, by the mangled name of the function."""
    parts = re.split(r"^\s*Function : (\S+)\s*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def torch_library() -> Path:
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not path.exists():
        raise cubin.MissingTool(f"{path} does not exist: this torch is built without CUDA; give one with --torch")
    return path


def judge(rows: list[dict[str, Any]], flash: Flash) -> list[dict[str, Any]]:
    for row in rows:
        peer = flash.densest(row["pass"] != "forward", row["head_dim"], row["dtype"])
        row["flash"] = peer
        same = row["head_dim"] == row["head_dim_v"]
        row["passed"] = None if peer is None or not same else row["density"] >= peer["density"]
    return rows


def show(rows: list[dict[str, Any]], arch: str) -> str:
    cells = []
    for row in rows:
        peer = row["flash"]
        cells.append(
            [
                row["pass"],
                row["dtype"],
                heads(row),
                str(row["tensor_core"]),
                str(row["issued"]),
                f"{row['density']:.1%}",
                str(row["body"]),
                f"{peer['tensor_core']}/{peer['issued']}" if peer else "-",
                f"{peer['density']:.1%}" if peer else "-",
                peer["kernel"] if peer else "-",
                {None: "not judged", True: "ok", False: "LESS DENSE"}[row["passed"]],
            ]
        )
    header = ["pass", "dtype", "D", "tensor core", "issued", "density", "body", "FA2", "density", "its tile", ""]
    return f"Main loops, {arch}: one round over a block, unmasked\n\n" + tables.render(header, cells)


def heads(row: dict[str, Any]) -> str:
    return str(row["head_dim"]) if row["head_dim"] == row["head_dim_v"] else f"{row['head_dim']}/{row['head_dim_v']}"


def counted(row: dict[str, Any], name: str) -> int:
    return sum(count for opcode, count in row["opcodes"].items() if opcode.split(".")[0] == name)


def loops_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/cuda.md: bfloat16 (float16 has the same code but for the type of the products)."""
    lines = [
        "| | head dims | HMMA | issued | density | FlashAttention-2 | LDSM / HMMA | MUFU | LDGSTS |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["dtype"] != "bfloat16":
            continue
        peer = f"{row['flash']['density']:.1%}" if row.get("flash") else ""
        lines.append(
            f"| {row['pass']} | {heads(row)} | {row['tensor_core']} | {row['issued']} | {row['density']:.1%} | {peer} | "
            f"{counted(row, 'LDSM') / row['tensor_core']:.2f} | {counted(row, 'MUFU')} | {counted(row, 'LDGSTS')} |"
        )
    return "\n".join(lines)


def roofline_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/cuda.md: how much of the peak the main loops can reach, and what bounds them."""
    gpus = (roofline.A100, roofline.H100)
    head = " | ".join(f"{gpu.name}: TFLOP/s at most | of peak | bound by" for gpu in gpus)
    lines = [f"| | head dims | {head} |", "|---|---|" + "--:|--:|---|" * len(gpus)]
    chosen = [row for row in rows if row["dtype"] == "bfloat16"]
    for direction in ("forward", "backward"):
        for dims in dict.fromkeys((r["head_dim"], r["head_dim_v"]) for r in chosen):
            group = [r for r in chosen if (r["head_dim"], r["head_dim_v"]) == dims and r["pass"].startswith(direction)]
            if not group:
                continue
            loops = [roofline.Loop(Counter(r["opcodes"]), r["warps"], r["pairs"]) for r in group]
            d, dv = dims
            flops = 2 * (d + dv) if direction == "forward" else 2 * (3 * d + 2 * dv)
            cells = []
            for gpu in gpus:
                reached, bounds = roofline.reach(loops, flops, gpu)
                cells.append(f"{reached:.0f} | {reached / gpu.peak:.0%} | {', '.join(dict.fromkeys(bounds))}")
            lines.append(f"| {direction} | {heads(group[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    """Makes the tables of docs/cuda.md those of these rows."""
    parts = {"main-loops": loops_table(rows), "roofline": roofline_table(rows)}
    documents.replace_blocks(cubin.ROOT / "docs" / "cuda.md", parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="packattn's CUDA library (default: the one that is installed)")
    parser.add_argument("--torch", type=Path, help="libtorch_cuda.so (default: that of the installed torch)")
    parser.add_argument("--arch", default="sm_80", help="architecture whose code is read (default: sm_80)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/cuda.md")
    options = parser.parse_args()
    try:
        rows = ours(options.library or cubin.packattn_library(), options.arch)
        if not rows:
            raise cubin.MissingTool(f"the library has no tensor-core kernels for {options.arch}")
        rows = judge(rows, Flash(options.torch or torch_library(), options.arch))
    except cubin.MissingTool as error:
        print(f"sass_report: {error}", file=sys.stderr)
        return 2
    print(show(rows, options.arch))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(rows)
    failed = [row for row in rows if row["passed"] is False]
    print(f"\n{len(rows)} kernels, {len(failed)} less dense than FlashAttention-2")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
