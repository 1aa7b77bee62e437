"""Looks into CUDA libraries with cuobjdump: which kernels they hold, their resources and their machine code.

cuobjdump and nvdisasm come with the CUDA toolkit, and in the PyPI package triton (which torch's CUDA builds depend on).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class MissingTool(RuntimeError):
    """No cuobjdump, no library: nothing can be reported."""


@functools.cache
def cuobjdump() -> Path:
    """The cuobjdump to use: $CUOBJDUMP, that of triton (the newest that is at hand), that of the PATH."""
    given = os.environ.get("CUOBJDUMP")
    if given:
        return Path(given)
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations or [] if spec else []:
        found = Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if found.exists():
            return found
    on_path = shutil.which("cuobjdump")
    if on_path is None:
        raise MissingTool("cuobjdump is missing: install the CUDA toolkit or triton, or set CUOBJDUMP")
    return Path(on_path)


def run(*arguments: str) -> str:
    tool = cuobjdump()
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # for nvdisasm
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise MissingTool(f"{tool.name} {' '.join(arguments)[:200]}: {done.stderr.strip()[:500]}")
    return done.stdout


def demangle(names: list[str]) -> list[str]:
    """The names as C++ spells them (c++filt of binutils)."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as it was compiled for one architecture. stack: bytes of stack frame, which hold what was spilled (and
    arrays that are indexed at run time); shared: bytes of shared memory that the kernel has without asking."""

    arch: str  # "sm_80"; "" for a cubin, which is for one
    mangled: str
    name: str
    registers: int
    stack: int
    shared: int

    @property
    def base(self) -> str:
        """The function's name, without namespaces and template arguments."""
        head = re.sub(r"[<(].*", "", self.name)
        return head.split("::")[-1].split()[-1]

    @property
    def shape(self) -> str:
        """The template argument that describes the tiles, a type whose name ends in Shape or Shapes; or ""."""
        found = re.search(r"[\w:]*Shapes?<", self.name)
        if found is None:
            return ""
        depth, start = 0, found.start()
        for at in range(start, len(self.name)):
            depth += {"<": 1, ">": -1}.get(self.name[at], 0)
            if depth == 0 and self.name[at] == ">":
                return self.name[start : at + 1]
        return self.name[start:]

    def arguments(self) -> str:
        """The template arguments, without the namespaces."""
        inside = re.search(r"<(.*)>\(", self.name)
        return re.sub(r"\b(?:\w+::)+", "", inside[1]) if inside else ""


def kernels(library: Path, arch: str | None = None) -> list[Kernel]:
    """Every kernel of a library or cubin, for one architecture ("sm_80") or all."""
    text = run("-res-usage", *(["-arch", arch] if arch else []), str(library))
    rows: list[tuple[str, str, int, int, int]] = []
    here = arch or ""
    name = ""
    for line in text.splitlines():
        if found := re.search(r"arch = (sm_\w+)", line):
            here = found[1]
        elif found := re.search(r"Function (\S+):", line):
            name = found[1]
        elif name and (found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)):
            rows.append((here, name, int(found[1]), max(int(found[2]), int(found[4])), int(found[3])))
            name = ""
    spelled = demangle([row[1] for row in rows]) if rows else []
    return [
        Kernel(a, m, n, registers, stack, shared)
        for (a, m, registers, stack, shared), n in zip(rows, spelled, strict=True)
    ]


def symbols(library: Path, arch: str) -> list[str]:
    """Mangled names of the kernels for one architecture (quicker than `kernels` for a large library)."""
    text = run("-symbols", "-arch", arch, str(library))
    return sorted(set(re.findall(r"STT_FUNC\s+STB_GLOBAL\s+STO_ENTRY\s+(\S+)", text)))


def machine_code(library: Path, arch: str, mangled: str) -> str:
    """The SASS of one kernel."""
    return run("-sass", *(["-arch", arch] if arch else []), "-fun", mangled, str(library))


def packattn_library() -> Path:
    """The CUDA library of the packattn that is imported (or built in place)."""
    candidates = [ROOT / "python" / "packattn" / "lib" / "packattn_cuda.so"]
    spec = importlib.util.find_spec("packattn")
    for folder in spec.submodule_search_locations or [] if spec else []:
        candidates.insert(0, Path(folder) / "lib" / "packattn_cuda.so")
    for path in candidates:
        if path.exists():
            return path
    raise MissingTool(f"no CUDA library was built: {candidates[0]} does not exist; build with PACKATTN_CUDA=on")
