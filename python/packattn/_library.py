"""Finds and loads the compiled libraries, and remembers why one is missing."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

REBUILD = "build it with `pip install .` from the source tree (it needs a C++ compiler)"
REBUILD_CUDA = "build it with `PACKATTN_CUDA=on pip install .` from the source tree (it needs nvcc)"


@dataclass(frozen=True)
class Library:
    """One compiled part: where it should be, and why it is not in use (None: it is)."""

    name: str
    path: Path
    missing: str | None

    @property
    def loaded(self) -> bool:
        return self.missing is None


def _switched_off() -> str | None:
    value = os.environ.get("PACKATTN_NATIVE", "")
    if value.lower() in ("0", "off", "false"):
        return "switched off by the environment variable PACKATTN_NATIVE"
    if value.lower() not in ("", "1", "on", "true"):
        raise ValueError(f"PACKATTN_NATIVE must be one of on, off; it is {value!r}")
    return None


def _load_ops(name: str, rebuild: str = REBUILD, missing: str | None = None) -> Library:
    """missing: why it is not to be loaded."""
    path = Path(__file__).parent / "lib" / f"{name}.so"
    missing = missing or _switched_off()
    if missing is None and not path.exists():
        missing = f"not built: {path} does not exist; {rebuild}"
    if missing is None:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            missing = f"failed to load: {error}; {rebuild} against this torch ({torch.__version__})"
    return Library(name, path, missing)


def _load_extension() -> tuple[ModuleType | None, str | None]:
    missing = _switched_off()
    if missing is None:
        try:
            return importlib.import_module("packattn._C"), None
        except ImportError as error:
            missing = f"{error}; {REBUILD}"
    return None, missing


def _load_cuda() -> Library:
    """Where torch has CUDA; a GPU need not be there. Without the library, the reason is the build's own."""
    if torch.version.cuda is None:
        return _load_ops("packattn_cuda", missing="this torch is built without CUDA")
    library = _load_ops("packattn_cuda", REBUILD_CUDA)
    if extension is None or library.path.exists() or _switched_off() or extension.build_info()["cuda"]:
        return library
    return Library(library.name, library.path, f"not built: {extension.build_info()['cuda_reason']}; {REBUILD_CUDA}")


CPU = _load_ops("packattn_cpu")
extension, extension_missing = _load_extension()
CUDA = _load_cuda()


def missing(device_type: str) -> str:
    """Why no compiled library serves tensors of a device type."""
    if device_type == "cpu":
        return CPU.missing or "the op has no compiled kernel"
    if device_type == "cuda":
        return f"packattn's CUDA kernels are missing, {CUDA.missing}"
    return f"packattn has no compiled kernels for device type {device_type!r}"


def refusals(device_type: str, dtype: str, head_dim: int, head_dim_v: int) -> list[str]:
    """Why the compiled attention kernels of a device do not serve a call; empty if they do, or if nobody knows.

    dtype: torch's name without "torch.".
    """
    if extension is None or device_type not in ("cpu", "cuda"):
        return []
    ask = extension.cpu_refusals if device_type == "cpu" else extension.cuda_refusals
    return list(ask(dtype, head_dim, head_dim_v))


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """One RuntimeWarning per key and process; silent while a graph is being traced."""
    if key in _warned or torch.compiler.is_compiling():
        return
    _warned.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
