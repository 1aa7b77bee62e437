"""What the kernels' own headers say of an instantiation: threads, shared memory, work of one round of the main loop.

A kernel's template arguments hold a type whose name ends in Shape. A small host program, compiled with g++ against the
emulator's headers, prints the constants of every such type that a library holds, so that no report repeats a formula.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cubin import ROOT, Kernel, MissingTool

# Constants that are printed where a shape has them.
CONSTANTS = (
    "kThreads", "kBlocks", "kSharedBytes", "D", "DV", "MT", "kKeys", "kRows", "ROWS", "KEYS", "SLICE", "SPLIT", "SLOTS",
    "STAGES", "kPart", "kColumns", "kColumnsV", "kTensorCore", "kConsumers", "kCopierRegisters", "kConsumerRegisters",
    "kKeyBytes", "kValueBytes", "kStageBytes", "kPass", "kStacked",
)  # fmt: skip

# Where the shapes stand, by a part of their names.
HEADERS = {"": "attention_*.cuh", "HopperForward": "hopper_forward*.cuh", "HopperBackward": "hopper_backward*.cuh"}


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """What blocks share, by compute capability (CUDA C++ Programming Guide, table "Technical Specifications per Compute
    Capability"). shared: bytes for all blocks; optin: the most that one block may have."""

    name: str
    threads: int
    shared: int
    optin: int
    registers: int = 65536
    blocks: int = 32


MULTIPROCESSORS = {
    "sm_75": Multiprocessor("T4", 1024, 64 * 1024, 64 * 1024, blocks=16),
    "sm_80": Multiprocessor("A100", 2048, 164 * 1024, 163 * 1024),
    "sm_86": Multiprocessor("A10, RTX 30", 1536, 100 * 1024, 99 * 1024, blocks=16),
    "sm_89": Multiprocessor("L40, RTX 40", 1536, 100 * 1024, 99 * 1024, blocks=24),
    "sm_90": Multiprocessor("H100, H200", 2048, 228 * 1024, 227 * 1024),
    "sm_100": Multiprocessor("B200", 2048, 228 * 1024, 227 * 1024),
    "sm_120": Multiprocessor("RTX 50", 1536, 100 * 1024, 99 * 1024, blocks=24),
}


def multiprocessor(arch: str) -> Multiprocessor:
    return MULTIPROCESSORS[arch.rstrip("af")]


def occupancy(arch: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at a time. Registers are given to warps in portions of 256, shared memory in
    portions of 128 bytes, and every block has 1 KiB of it for the system (from 8.0 on); 0 if one block asks too much."""
    sm = multiprocessor(arch)
    if shared > sm.optin:
        return 0
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = sm.registers // 4 // per_warp * 4 // warps  # a warp's registers lie in one quarter
    reserved = 0 if arch == "sm_75" else 1024
    by_shared = sm.shared // (-(-shared // 128) * 128 + reserved) if shared + reserved else sm.blocks
    return min(sm.blocks, sm.threads // threads, by_registers, by_shared)


def read(shapes: Iterable[str]) -> dict[str, dict[str, int]]:
    """The constants of every shape, by its name as c++filt spells it."""
    names = sorted(set(shapes))
    if not names:
        return {}
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise MissingTool("no C++ compiler: the shapes of the kernels cannot be read")
    sources = ROOT / "csrc" / "cuda"
    headers = [
        path.name
        for shape, pattern in HEADERS.items()
        if any(shape in name for name in names)
        for path in sorted(sources.glob(pattern))
    ]
    lines = [f'#include "{name}"' for name in headers]
    lines += ["#include <cstdio>", "template <class S> void show(const char* name) {", '  std::printf("%s", name);']
    for constant in CONSTANTS:
        lines.append(
            f"  if constexpr (requires {{ S::{constant}; }}) "
            f'std::printf("\\t{constant}=%lld", static_cast<long long>(S::{constant}));'
        )
    lines += ['  std::printf("\\n");', "}", "int main() {"]
    lines += [f"  show<{name}>({json.dumps(name)});" for name in names]
    lines.append("}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "shapes.cpp"), Path(folder, "shapes")
        source.write_text("\n".join(lines), encoding="utf-8")
        flags = ["-std=c++20", "-O0", "-w", f"-I{sources}", f"-I{ROOT / 'tests' / 'emulator'}"]
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise MissingTool(
                "the shapes of the kernels do not compile; was the library built from other sources than these headers?\n"
                + done.stderr[-2000:]
            )
        printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in printed.splitlines():
        name, *values = line.split("\t")
        found[name] = {key: int(value) for key, value in (pair.split("=") for pair in values)}
    return found


def in_use(kernels: Iterable[Kernel], constants: dict[str, dict[str, int]], arch: str) -> list[Kernel]:
    """Those that run on this architecture, where a kernel has tiles for much and for little shared memory: of the same
    name, dtype and head dims, the one with the most shared memory that a block may have there."""
    best: dict[tuple[str, str, int, int, bool], Kernel] = {}
    optin = multiprocessor(arch).optin
    for kernel in kernels:
        shape = constants.get(kernel.shape)
        if shape is None or shape["kSharedBytes"] > optin:
            continue
        dtype = next((d for d in ("bf16_t", "f16_t", "float") if re.search(rf"\b{d}\b", kernel.name)), "")
        softcap = kernel.name.split("(")[0].rstrip().endswith("true>")
        key = (kernel.base, dtype, shape.get("D", 0), shape.get("DV", 0), softcap)
        if key not in best or shape["kSharedBytes"] > constants[best[key].shape]["kSharedBytes"]:
            best[key] = kernel
    return list(best.values())
