"""Cases of the table on the devices of the CUDA kernels: the emulator (always), and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import emulated_backend
import pytest
import torch
from cases import Case
from helpers import Inputs, run

import packattn
from packattn import _library

DEVICES = ("emulated", "cuda")


def skip_unless_here(device: str) -> None:
    if device == "emulated" and (why := emulated_backend.why_not()):
        pytest.skip(f"no emulated kernels: {why}")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if device == "cuda" and not _library.CUDA.loaded:
        pytest.fail(f"a GPU is here, and the CUDA kernels are not: {_library.CUDA.missing}")


@contextmanager
def ops_of(device: str) -> Iterator[Any]:
    """torch.ops.packattn is that of the device."""
    if device == "emulated":
        with emulated_backend.emulated():
            yield torch.ops.packattn
    else:
        yield torch.ops.packattn


def copied(value: torch.Tensor, device: str) -> torch.Tensor:
    """On that device, with the same strides, also of 0 and with gaps, and as far from a multiple of 16 bytes."""
    if value.numel() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(value.size(), value.stride(), strict=True))
    flat = value.detach().as_strided((extent,), (1,), value.storage_offset())
    odd = value.data_ptr() % 16 // value.element_size()  # memory of its own begins at a multiple
    there = torch.empty(odd + extent, dtype=value.dtype, device=device)[odd:].copy_(flat)
    return there.as_strided(value.size(), value.stride())


def moved(value: Any, device: str) -> Any:
    """A tensor as copied() has it; a Packing; anything else as it is. emulated: nothing moves."""
    if device != "cuda" or value is None:
        return value
    if isinstance(value, packattn.Packing):
        return value.to("cuda")
    return copied(value, "cuda") if isinstance(value, torch.Tensor) else value


def run_on(device: str, case: Case, x: Inputs, **changes: Any) -> dict[str, torch.Tensor]:
    """As helpers.run, there; the results come back to the CPU."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: packattn.Packing, **options: Any) -> Any:
        options = {name: moved(value, device) for name, value in options.items()}
        return packattn.attention(q, k, v, moved(packing, device), **options)

    there = Inputs(*(moved(getattr(x, f.name), device) for f in fields(x)))
    with ops_of(device):
        results = run(case, there, attention, **changes)
    return {name: t.cpu() for name, t in results.items()}
