"""What the emulator believes about fragments, swizzles and descriptors, against CuTe, index by index.

Kernel and emulator share their author's beliefs about the hardware; NVIDIA's own library does not. CuTe's layouts are
evaluated on the host: the headers of the wheel nvidia-cutlass and of a CUDA toolkit, no GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import emulator_programs as programs
import pytest

pytestmark = pytest.mark.skipif(programs.why_not() is not None, reason=str(programs.why_not()))


def cutlass() -> Path | None:
    """The folder include/ of the wheel."""
    try:
        files = importlib.metadata.files("nvidia-cutlass") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    header = next((f for f in files if str(f).endswith("source/include/cute/tensor.hpp")), None)
    return None if header is None else Path(str(header.locate())).parent.parent


def cuda_headers() -> Iterator[Path]:
    """Folders that may hold cuda_runtime_api.h: the toolkit's, and those of NVIDIA's wheels."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            yield Path(home) / "include"
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu1*/include"))


@pytest.fixture(scope="module")
def cute_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    headers = cutlass()
    if headers is None:
        pytest.skip("needs CuTe: pip install 'packattn[cutlass]'")
    folders = [f for f in cuda_headers() if (f / "cuda_runtime_api.h").exists() and (f / "cccl" / "cuda").exists()]
    if not folders:
        pytest.skip("needs the headers of a CUDA toolkit with CCCL")
    program = tmp_path_factory.mktemp("cute") / "layouts"
    includes = [headers, folders[0], folders[0] / "cccl"]
    command = [programs.compiler() or "g++", "-std=c++20", "-w", *(f"-I{folder}" for folder in includes)]
    done = subprocess.run(
        [*command, str(programs.EMULATOR / "layouts_cute.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # On the host CuTe cannot say where shared memory lies; the layouts do not depend on it.
    return [line for line in programs.run(program).stdout.splitlines() if not line.startswith("ERROR: cast_smem_ptr")]


def test_every_index(cute_lines: list[str]) -> None:
    done = programs.run(programs.build("layouts_emulated.cpp"))
    assert done.returncode == 0, done.stdout[-2000:]
    ours = done.stdout.splitlines()
    assert len(ours) > 100_000
    assert len(cute_lines) == len(ours)
    pairs = zip(cute_lines, ours, strict=True)
    different = [f"CuTe: {theirs}; emulator: {line}" for theirs, line in pairs if theirs != line]
    assert not different, different[:10]
