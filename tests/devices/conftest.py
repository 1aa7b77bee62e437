"""Everything here runs the CUDA kernels: on the emulator, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from on_device import DEVICES, skip_unless_here


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    skip_unless_here(request.param)
    return str(request.param)


@pytest.fixture
def emulator() -> Iterator[None]:
    """For what only the emulator shows; puts its schedule back."""
    skip_unless_here("emulated")
    import emulated_backend

    emulated_backend.load()
    yield
    emulated_backend.schedule(*emulated_backend.SCHEDULES[0])
