"""Deliberate breaks of the kernels (tests/emulator/mutations): each must be noticed, so that tests are known to see."""

from __future__ import annotations

import subprocess
import sys

import emulator_programs as programs
import pytest

pytestmark = pytest.mark.skipif(programs.why_not() is not None, reason=str(programs.why_not()))

SCRIPT = programs.EMULATOR / "mutate.py"
LISTS = sorted(path.stem for path in (programs.EMULATOR / "mutations").glob("*.py"))


def mutate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_every_break_applies() -> None:
    """A list that has been left behind by its kernel proves nothing."""
    done = mutate("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_every_break_is_noticed(name: str) -> None:
    done = mutate(name)
    assert done.returncode == 0, done.stdout + done.stderr
