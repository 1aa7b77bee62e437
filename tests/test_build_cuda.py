"""The CUDA part of the build: when it is built and for which GPUs, how it refuses, and what the library promises.

Nothing here needs a GPU. The slow test builds the library, with a torch that has CUDA: this interpreter's, or that of one
named in PACKATTN_OTHER_PYTHON.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_build import ROOT, in_source_tree, needs_tools, run

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
pytestmark = [in_source_tree, needs_tools]


def nvcc_version() -> str:
    text = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    assert found
    return found[1]


def tool(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert path is not None
    return path


@pytest.fixture
def torch_with_cuda(tmp_path: Path):
    """An interpreter that finds a torch which says that it was built for a version of CUDA; enough for configuring."""

    def make(cuda: str | None) -> Path:
        fake = tmp_path / "site" / "torch"
        (fake / "lib").mkdir(parents=True)
        real = Path(torch.__file__).parent
        (fake / "__init__.py").write_text("")
        text = (real / "version.py").read_text(encoding="utf-8")
        (fake / "version.py").write_text(re.sub(r"(?m)^cuda.*$", f"cuda: Optional[str] = {cuda!r}", text))
        (fake / "include").symlink_to(real / "include")
        (fake / "lib" / "libtorch_cpu.so").symlink_to(real / "lib" / "libtorch_cpu.so")
        if cuda:
            (fake / "lib" / "libtorch_cuda.so").write_text("")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        return python

    return make


def configure(python: Path | str, build: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    options = (f"-DPython_EXECUTABLE={python}", "-DPACKATTN_BUILD_PYTHON_MODULE=OFF", *options)
    # Elsewhere than the tree's own libraries: a configuration without CUDA removes the one built before.
    output = f"-DPACKATTN_OUTPUT_DIR={build / 'out'}"
    return run(tool("cmake"), "-S", ROOT, "-B", build, output, *ninja, *options, **variables)


def said(answer: subprocess.CompletedProcess[str]) -> str:
    """CMake wraps its messages."""
    return " ".join((answer.stdout + answer.stderr).split())


# ---- whether ---------------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_builds_the_cpu_part(torch_with_cuda, tmp_path):
    python = torch_with_cuda(None)
    answer = configure(python, tmp_path / "build")
    assert answer.returncode == 0, answer.stderr
    assert "without CUDA kernels: torch" in said(answer) and "is built without CUDA" in said(answer)
    answer = configure(python, tmp_path / "on", "-DPACKATTN_CUDA=on")
    assert answer.returncode != 0
    assert re.search(r"PACKATTN_CUDA=on, but torch \S+ is built without CUDA", said(answer))


def test_no_compiler_for_cuda_builds_the_cpu_part(torch_with_cuda, tmp_path):
    """Named by CUDACXX, as one on the machine would be found otherwise."""
    python = torch_with_cuda("13.0")
    answer = configure(python, tmp_path / "build", CUDACXX=str(tmp_path / "nvcc"))
    assert answer.returncode == 0, answer.stderr
    assert "is no CUDA compiler" in said(answer)
    answer = configure(python, tmp_path / "on", "-DPACKATTN_CUDA=ON", CUDACXX=str(tmp_path / "nvcc"))
    assert answer.returncode != 0 and "PACKATTN_CUDA=on, but" in said(answer)


@needs_nvcc
def test_a_compiler_newer_than_torchs_cuda_is_not_used(torch_with_cuda, tmp_path):
    older = f"{int(nvcc_version().split('.')[0]) - 1}.8"
    answer = configure(torch_with_cuda(older), tmp_path / "build")
    assert answer.returncode == 0, answer.stderr
    assert f"nvcc {nvcc_version()} is newer than the CUDA {older} of torch" in said(answer)


@needs_nvcc
def test_switched_off(torch_with_cuda, tmp_path):
    answer = configure(torch_with_cuda(nvcc_version()), tmp_path / "build", "-DPACKATTN_CUDA=off")
    assert answer.returncode == 0, answer.stderr
    assert "without CUDA kernels: switched off by PACKATTN_CUDA=off" in said(answer)


# ---- for which GPUs --------------------------------------------------------------------------------------------------


def gencodes(build: Path, source: str) -> list[str]:
    """What the compile command of a source says."""
    text = (build / "compile_commands.json").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if '"command"' in line and source in line)
    return re.findall(r"arch=(compute_\w+),code=([\w\[\],]+)", command.replace("\\", ""))


@needs_nvcc
@pytest.mark.parametrize(
    ("archs", "said_archs", "everywhere", "tensor_cores"),
    [
        ("8.0", "8.0", [("compute_80", "sm_80")], [("compute_80", "sm_80")]),
        (
            "7.5;9.0+PTX",
            "7.5 9.0+PTX",
            [("compute_75", "sm_75"), ("compute_90", "[sm_90,compute_90]")],
            [("compute_90", "[sm_90,compute_90]")],
        ),
        ("8.6 9.0a", "8.6 9.0a", [("compute_86", "sm_86"), ("compute_90a", "sm_90a")], None),
        ("7.5", "7.5", [("compute_75", "sm_75")], [("compute_80", "sm_80")]),
    ],
)
def test_architectures(archs, said_archs, everywhere, tensor_cores, torch_with_cuda, tmp_path):
    answer = configure(
        torch_with_cuda(nvcc_version()), tmp_path / "build", f"-DPACKATTN_CUDA_ARCH_LIST={archs.replace(';', ' ')}"
    )
    assert answer.returncode == 0, answer.stderr
    assert f"CUDA kernels for {said_archs} " in said(answer).replace(";", " ") + " "
    assert gencodes(tmp_path / "build", "cuda/metadata.cu") == everywhere
    assert gencodes(tmp_path / "build", "/forward_bfloat16_64_64.cu") == (tensor_cores or everywhere)
    commands = (tmp_path / "build" / "compile_commands.json").read_text(encoding="utf-8")
    assert ("hopper_forward_" in commands) == ("9.0a" in archs)
    if "9.0a" in archs:
        assert gencodes(tmp_path / "build", "hopper_forward_bfloat16_64_64.cu") == [("compute_90a", "sm_90a")]


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here decides")
def test_architectures_by_default(torch_with_cuda, tmp_path):
    """A binary for each generation, and PTX for what comes after."""
    answer = configure(torch_with_cuda(nvcc_version()), tmp_path / "build")
    assert answer.returncode == 0, answer.stderr
    codes = [code for _, code in gencodes(tmp_path / "build", "/forward_bfloat16_64_64.cu")]
    assert codes[:2] == ["sm_80", "sm_90a"] and re.fullmatch(r"\[sm_\d+,compute_\d+\]", codes[-1])


@needs_nvcc
@pytest.mark.parametrize(
    ("archs", "message"),
    [
        ("Ampere", 'TORCH_CUDA_ARCH_LIST must hold compute capabilities such as 8.0, .* it has "Ampere"'),
        ("6.0", r"TORCH_CUDA_ARCH_LIST has 6.0, which nvcc \S+ does not compile for"),
    ],
)
def test_architectures_that_are_none(archs, message, torch_with_cuda, tmp_path):
    python = torch_with_cuda(nvcc_version())
    answer = configure(python, tmp_path / "build", f"-DPACKATTN_CUDA_ARCH_LIST={archs}")
    assert answer.returncode != 0 and re.search(message, said(answer))


# ---- the library -----------------------------------------------------------------------------------------------------


def interpreter_with_cuda() -> str | None:
    ask = "import torch; print(torch.version.cuda or '')"
    for python in (sys.executable, *filter(None, os.environ.get("PACKATTN_OTHER_PYTHON", "").split(os.pathsep))):
        if run(python, "-c", ask).stdout.strip():
            return python
    return None


CHECK = """
import torch, packattn
from packattn import _library
from packattn.cli import info
assert _library.CUDA.loaded, _library.CUDA
for name in packattn.ops.SCHEMAS:
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"packattn::{name}", "CUDA")
    assert has == (name != "attention" and not name.endswith("_reference")), name
facts = info.collect()
kernels = {(r["dtype"], r["head_dim"]): r["kernel"] for r in facts["kernels"] if r["device"] == "cuda"}
assert kernels["bfloat16", 128].startswith("compiled, "), kernels
assert kernels["float64", 128] == info.REFERENCE
assert "none here" not in info.text(facts)
print("torch", torch.__version__)
"""


@pytest.mark.slow
@needs_nvcc
def test_the_cuda_library(tmp_path):
    """Built for one architecture; loads with that torch, without a GPU, and says what it serves."""
    python = interpreter_with_cuda()
    if python is None:
        pytest.skip("no torch with CUDA; name an interpreter in PACKATTN_OTHER_PYTHON")
    package = tmp_path / "installed" / "packattn"
    shutil.copytree(ROOT / "python" / "packattn", package)
    for old in package.rglob("packattn_cuda.so"):
        old.unlink()
    options = ["-DPACKATTN_CUDA=on", "-DPACKATTN_CUDA_ARCH_LIST=8.0", f"-DPACKATTN_OUTPUT_DIR={package}"]
    answer = configure(python, tmp_path / "build", *options)
    assert answer.returncode == 0, answer.stderr
    jobs = os.environ.get("MAX_JOBS", "2")
    answer = run(tool("cmake"), "--build", tmp_path / "build", "--parallel", jobs, "--target", "packattn_cuda")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "warning" not in answer.stdout + answer.stderr

    library = package / "lib" / "packattn_cuda.so"
    dynamic = run("readelf", "-d", library).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    system = {
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "libc.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    }
    assert {name for name in needed - system if not name.startswith("ld-linux")} == {
        "libtorch_cpu.so",
        "libtorch_cuda.so",
    }
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = run("readelf", "-W", "--dyn-syms", library).stdout
    assert re.findall(r"UND.* (_ZNK?\d*(?:2at|3c10|5torch)\w+)", symbols) == []
    assert not [line for line in symbols.splitlines() if "cudaLaunchKernel" in line], (
        "the runtime's symbols stay inside"
    )
    answer = run(python, "-c", CHECK, PYTHONPATH=str(package.parent))
    assert answer.returncode == 0, answer.stderr
