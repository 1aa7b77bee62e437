"""The sm_90a kernels as nvcc compiles them: nothing spilled, nothing serialised, main loops within what was planned.

Every instantiation is compiled, which takes two minutes. If PACKATTN_BUILD_LOG names the output of a build that did
it (PIP_LOG of the pip that built the packattn that is imported), that is read, and the library that was built.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the reports are in benchmarks/", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import cubin
import hopper_report

SOURCES = sorted((ROOT / "csrc" / "cuda" / "instantiations").glob("hopper_*.cu"))
NVCC = shutil.which("nvcc")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")]


@dataclass
class Built:
    """What the compiler said, and where the kernels are: files, and their architecture (None: cubins have but one)."""

    text: str
    files: list[Path]
    arch: str | None
    kernels: list[cubin.Kernel] = field(init=False)

    def __post_init__(self) -> None:
        found = [kernel for path in self.files for kernel in cubin.kernels(path, self.arch)]
        self.kernels = [kernel for kernel in found if kernel.base in hopper_report.PASSES]


def compiled(folder: Path) -> Built:
    text, files = "", []
    for source in SOURCES:
        files.append(folder / f"{source.stem}.cubin")
        command = [str(NVCC), "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
        command += ["-cubin", str(source), "-o", str(files[-1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text += f"{source.name}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, text[-8000:]
    return Built(text, files, None)


def built_before(log: str | None) -> Built | None:
    """None where there is no log, or of a build that found some of it compiled already."""
    if not log:
        return None
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    if without := re.search(r"without CUDA kernels: .*", text):
        pytest.skip(without[0])
    if any(source.name not in text for source in SOURCES):
        return None
    return Built(text, [cubin.packattn_library()], hopper_report.ARCH)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if importlib.util.find_spec("triton") is None and "CUOBJDUMP" not in os.environ and not shutil.which("cuobjdump"):
        pytest.skip("cuobjdump is not there (it comes with triton)")
    return built_before(os.environ.get("PACKATTN_BUILD_LOG")) or compiled(tmp_path_factory.mktemp("cubins"))


def test_every_instantiation_is_there(built: Built) -> None:
    functions = {kernel.base for kernel in built.kernels}
    wanted = {"forward": {"hopper_forward_kernel"}, "backward": {"hopper_backward_keys", "hopper_backward_query"}}
    directions = {source.stem.split("_")[1] for source in SOURCES}
    assert functions == set().union(*(wanted[direction] for direction in directions))
    assert len(built.kernels) >= 2 * len(SOURCES)
    softcap = [kernel.name.split("(")[0].endswith("true>") for kernel in built.kernels]
    assert sum(softcap) * 2 == len(softcap)


def test_the_compiler_has_nothing_to_say(built: Built) -> None:
    """No C75xx line: products serialised (C7510 to C7514, C7519), setmaxnreg ignored (C7508)."""
    assert not re.search(r".*\bC75\d\d\b.*", built.text), re.findall(r".*\bC75\d\d\b.*", built.text)
    assert not re.search(r".*(?:nvcc|ptxas) warning.*", built.text), re.findall(r".*warning.*", built.text)


def test_no_register_is_spilled(built: Built) -> None:
    """What is spilled lies in the stack frame."""
    assert {kernel.name: kernel.stack for kernel in built.kernels if kernel.stack} == {}


def test_main_loops(built: Built) -> None:
    rows: list[dict[str, Any]] = []
    for path in built.files:
        rows += hopper_report.rows_of(path, built.arch)
    assert len(rows) * 2 == len(built.kernels)
    assert hopper_report.faults(rows) == []
