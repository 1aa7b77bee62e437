"""What holds in every test: memory that is not zero, a known number of threads, skips with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch loads OpenMP: threads that wait by spinning make small products up to ten times slower as soon as another
# process is busy (other test workers, a build).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

import packattn


def pytest_configure(config: pytest.Config) -> None:
    """Cases that the compiled kernels do not serve are in the table on purpose; test_fallback.py looks at the warning."""
    config.addinivalue_line("filterwarnings", "ignore:packattn. plain PyTorch serves:RuntimeWarning")


torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every new tensor that nobody has written holds NaN (integers: their maximum).

    torch does this for at::empty under deterministic algorithms, which the ops of the compiled library allocate
    through as well; a row that a kernel leaves unwritten shows as NaN. test_bits.py poisons malloc too.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def native() -> None:
    """For what only the compiled library promises."""
    if not packattn._library.CPU.loaded:
        pytest.skip("the compiled CPU library is not there")


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
