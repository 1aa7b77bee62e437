"""The conformance program: every instruction on fixed inputs, for a GPU and for the emulator, and how they compare."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import emulator_programs as programs
import pytest

pytestmark = pytest.mark.skipif(programs.why_not() is not None, reason=str(programs.why_not()))

SOURCE = programs.EMULATOR / "conformance.cu"
COMPARE = programs.EMULATOR / "conformance.py"


@pytest.fixture(scope="module")
def emulated() -> str:
    done = programs.run(programs.build(SOURCE.name))
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare(folder: Path, first: str, second: str) -> subprocess.CompletedProcess[str]:
    paths = [folder / "first.txt", folder / "second.txt"]
    for path, text in zip(paths, (first, second), strict=True):
        path.write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, COMPARE, *paths], capture_output=True, text=True, check=False)


def test_emulated_half(emulated: str, tmp_path: Path) -> None:
    done = compare(tmp_path, emulated, emulated)
    assert done.returncode == 0 and f"{len(emulated.splitlines())} lines compared, 0 differ" in done.stdout
    for name in ("shuffles", "async copies", "ldmatrix", "mma bf16", "narrow bits f16", "ex2", "bulk copy 2d 128"):
        assert f" {name} " in emulated


def test_the_parts_together_are_the_whole(emulated: str) -> None:
    program = programs.build(SOURCE.name)
    parts = [programs.run(program, part).stdout for part in ("sm80", "sm90")]
    assert "".join(parts) == emulated
    assert " wgmma " in parts[1] and " wgmma " not in parts[0] and " bulk copy " not in parts[0]


def test_differences_are_found(emulated: str, tmp_path: Path) -> None:
    lines = emulated.splitlines()
    mma = next(i for i, line in enumerate(lines) if line.startswith("exact mma bf16"))
    ex2 = next(i for i, line in enumerate(lines) if line.startswith("close ex2"))
    words = lines[ex2].split()
    lines[mma] = lines[mma][:-1] + ("0" if lines[mma][-1] != "0" else "1")
    lines[ex2] = " ".join([*words[:-1], repr(float(words[-1]) * (1 + 1e-6))])
    done = compare(tmp_path, emulated, "\n".join(lines))
    assert done.returncode == 1 and "2 differ" in done.stdout, done.stdout


def test_every_function_is_tried() -> None:
    """Each function of ptx.cuh and ptx_sm90.cuh stands in the program."""
    program = SOURCE.read_text(encoding="utf-8") + SOURCE.with_name("conformance_sm90.cuh").read_text(encoding="utf-8")
    missing = []
    for header in ("ptx.cuh", "ptx_sm90.cuh", "ptx_sm90_wgmma.cuh"):
        text = (programs.ROOT / "csrc" / "cuda" / header).read_text(encoding="utf-8")
        names = [line.split("(")[0].split()[-1] for line in text.splitlines() if line.startswith("PACKATTN_DEVICE ")]
        assert names
        missing += [name for name in names if not any(f"{name}{after}" in program for after in "(<")]
    assert not missing


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_half_for_the_gpu_compiles(architecture: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++20", "-O2", "-Werror=all-warnings", f"-arch={architecture}", str(SOURCE)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "conformance")], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
