"""Programs of tests/emulator: builds them with the machine's C++ compiler, when a source is newer, and runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
FOLDERS = ("csrc/common", "csrc/cpu", "csrc/cuda", "tests/emulator")  # all that a program is made of
# No contraction of products and sums: the same numbers on every machine. -g1 for the lines in a sanitizer's report.
FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off")
SANITIZERS = ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def compiler() -> str | None:
    return next((path for name in ("g++", "c++") if (path := shutil.which(name))), None)


def why_not() -> str | None:
    """Why no program can be built here; None if they can."""
    if not (ROOT / "csrc" / "cuda").exists():
        return "the source tree is not here"
    return None if compiler() else "needs g++"


def command(source: Path, output: Path, *flags: str, root: Path = ROOT) -> list[str]:
    """How a program is compiled. root: of the tree that its headers are taken from."""
    folders = [f"-I{root / folder}" for folder in ("tests/emulator", "csrc/cuda", "csrc")]
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    return [compiler() or "g++", *FLAGS, *flags, *folders, *language, str(source), "-o", str(output)]


def build(name: str, *flags: str) -> Path:
    """The program made of tests/emulator/<name>, for example "selftest.cpp"."""
    flags = flags or ("-O2",)
    folder = ROOT / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    variant = "".join(c if c.isalnum() else "_" for c in "".join(flags))
    program = folder / f"{Path(name).stem}{variant}"
    newest = max(path.stat().st_mtime for part in FOLDERS for path in (ROOT / part).rglob("*") if path.is_file())
    if not program.exists() or program.stat().st_mtime < newest:
        partial = program.with_name(f"{program.name}.{os.getpid()}")
        done = subprocess.run(
            command(EMULATOR / name, partial, *flags), capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-8000:]
        partial.replace(program)
    return program


def run(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
