"""The emulator that runs the CUDA kernels on the CPU: its own tests, and the kernels' native test programs on it."""

from __future__ import annotations

import platform
import subprocess
import sys

import emulator_programs as programs
import pytest

pytestmark = pytest.mark.skipif(programs.why_not() is not None, reason=str(programs.why_not()))

POLICIES = ("0", "1", "2")  # which thread runs next: the lowest, the highest, any
# Every program that takes no argument and exits with 0 if all it has tried was right.
NATIVE = sorted(
    path.name for ending in ("*_test.cpp", "*_driver.cpp") for path in programs.EMULATOR.glob(ending)
)  # fmt: skip


def passes(name: str, *flags: str, **environment: str) -> None:
    done = programs.run(programs.build(name, *flags), **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.mark.parametrize("name", ["selftest.cpp", "selftest_sm90.cpp"])
def test_itself(name: str) -> None:
    """Right numbers from right kernels, and a report of the right kind from each wrong one."""
    for policy in POLICIES:
        passes(name, PACKATTN_EMULATOR_POLICY=policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selftest.cpp", "selftest_sm90.cpp"])
def test_itself_sanitized(name: str) -> None:
    passes(name, *programs.SANITIZERS)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NATIVE)
def test_kernels(name: str, policy: str) -> None:
    passes(name, PACKATTN_EMULATOR_POLICY=policy)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag for fused multiply-adds is that of x86-64")
def test_kernels_with_products_and_sums_contracted() -> None:
    """As nvcc has them: a difference from what a product was rounded to is then not 0."""
    passes("hopper_driver.cpp", "-O2", "-mfma", "-ffp-contract=fast")


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_kernels_sanitized(name: str) -> None:
    passes(name, *programs.SANITIZERS)


def test_wgmma_text_is_generated() -> None:
    script = programs.ROOT / "csrc" / "cuda" / "generate_wgmma.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0
