"""The CUDA kernels on the CPU, as torch ops: builds tests/emulated on demand and routes packattn to it.

The library registers its kernels in the namespace ``packattn_emulated``, whose schemas, fakes and autograd formulas are
those of ``packattn`` (packattn.ops.register). Whatever the emulator finds wrong makes the op that ran the kernel throw.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from packattn import _library, ops

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "packattn_emulated"
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)  # that csrc/cuda/device.cu can pretend to have
SCHEDULES = ((1, 0), (2, 1), (3, 2))  # (seed, policy): threads upwards, downwards, at random


def tool(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def why_not() -> str | None:
    """Why the library cannot be built here; None if it can."""
    if not (ROOT / "csrc" / "cuda").exists():
        return "the source tree is not here"
    if tool("cmake") is None or not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
        return "needs cmake and a C++ compiler"
    return None


def build_folder() -> Path:
    return ROOT / "build" / f"emulated-torch{torch.__version__.partition('+')[0]}"


@functools.cache
def build() -> Path | str:
    """The library, built if its sources are newer; why it could not be. Waits for another process that is building it."""
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    cmake, ninja = tool("cmake"), tool("ninja")
    assert cmake is not None
    configure = [cmake, "-S", str(ROOT / "tests" / "emulated"), "-B", str(folder), "-DCMAKE_BUILD_TYPE="]
    configure += [f"-DPACKATTN_TORCH_DIR={Path(torch.__file__).parent}"]
    configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    jobs = os.environ.get("MAX_JOBS", "") or str(min(2, os.cpu_count() or 1))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, [cmake, "--build", str(folder), "--parallel", jobs]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"building the emulated library failed:\n{done.stdout}\n{done.stderr}"
    return folder / f"{NAMESPACE}.so"


def refusals(device_type: str, dtype: str, head_dim: int, head_dim_v: int) -> list[str]:
    return [] if _library.extension is None else list(_library.extension.cuda_refusals(dtype, head_dim, head_dim_v))


@functools.cache
def load() -> ctypes.CDLL:
    """The library, registered as torch.ops.packattn_emulated. Once in a process."""
    path = build()
    if isinstance(path, str):
        raise RuntimeError(path)  # noqa: TRY004, it is the reason, not a wrong type
    ops.register(NAMESPACE, refusals, fallback=False)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.packattn_emulator_schedule.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.packattn_emulator_take_blocks.restype = ctypes.c_uint64
    return library


def schedule(seed: int, policy: int) -> None:
    """In which order threads and blocks run from here on; policy 0, 1 or 2 (tests/emulator/README.md)."""
    load().packattn_emulator_schedule(seed, policy)


def take_blocks() -> int:
    """How many blocks the emulator has run since the last call."""
    return int(load().packattn_emulator_take_blocks())


@contextmanager
def emulated() -> Iterator[None]:
    """torch.ops.packattn, and with it every function of packattn, is the emulated namespace."""
    load()
    real = torch.ops.packattn
    torch.ops.packattn = getattr(torch.ops, NAMESPACE)
    try:
        yield
    finally:
        torch.ops.packattn = real


def broken_launch() -> str:
    """What a launch throws whose kernel reads shared memory that nobody wrote."""
    text = ctypes.create_string_buffer(2000)
    load().packattn_emulator_broken_launch(text, len(text))
    return text.value.decode()
