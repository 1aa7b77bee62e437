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


def _load_ops(name: str) -> Library:
    path = Path(__file__).parent / "lib" / f"{name}.so"
    missing = _switched_off()
    if missing is None and not path.exists():
        missing = f"not built: {path} does not exist; {REBUILD}"
    if missing is None:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            missing = f"failed to load: {error}; {REBUILD} against this torch ({torch.__version__})"
    return Library(name, path, missing)


def _load_extension() -> tuple[ModuleType | None, str | None]:
    missing = _switched_off()
    if missing is None:
        try:
            return importlib.import_module("packattn._C"), None
        except ImportError as error:
            missing = f"{error}; {REBUILD}"
    return None, missing


CPU = _load_ops("packattn_cpu")
extension, extension_missing = _load_extension()

_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """One RuntimeWarning per key and process; silent while a graph is being traced."""
    if key in _warned or torch.compiler.is_compiling():
        return
    _warned.add(key)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
