"""The sm_90a kernels as nvcc compiles them: nothing spilled, nothing serialised."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda" / "instantiations").glob("hopper_*.cu"))
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_ptxas_has_nothing_to_say(source: Path, tmp_path: Path) -> None:
    """No C75xx line: products serialised (C7510 to C7514, C7519), setmaxnreg ignored (C7508)."""
    command = [str(NVCC), "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["-Xptxas", "-v", "-cubin", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert len(spills) == 2 and set(spills) == {("0", "0", "0")}, text  # with a soft cap and without
    assert not re.search(r"C75\d\d|warning", text), text
