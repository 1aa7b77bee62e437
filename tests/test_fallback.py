"""Without a compiled library, and for what it does not serve: the same results, and one warning that says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from cases import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, SUBSET, id_of
from torch.profiler import ProfilerActivity, profile
from worker import in_subprocess

import packattn
from packattn import _library, checks
from packattn.cli import info


def copy_of_the_package(to: Path, library: bytes | None) -> None:
    """packattn without its native files, or with one that is not a library."""
    here = Path(packattn.__file__).parent
    ignore = shutil.ignore_patterns("*.so", "*.dylib", "*.pyd", "__pycache__", "lib")
    shutil.copytree(here, to / "packattn", ignore=ignore)
    if library is not None:
        (to / "packattn" / "lib").mkdir()
        (to / "packattn" / "lib" / _library.CPU.path.name).write_bytes(library)


def test_switched_off_gives_the_same_results() -> None:
    report = in_subprocess("check", PACKATTN_NATIVE="off")
    assert not report["loaded"] and report["isa"] is None
    assert report["cases"] == 2 * len(SUBSET) and report["failures"] == []
    assert len(report["warnings"]) == 1 and "PACKATTN_NATIVE" in report["warnings"][0]


def test_a_switch_that_says_nothing_is_an_error() -> None:
    """PACKATTN_NATIVE=no would otherwise leave the compiled libraries on."""
    with pytest.raises(RuntimeError, match="PACKATTN_NATIVE must be one of on, off; it is 'no'"):
        in_subprocess("fallback_warnings", "served", PACKATTN_NATIVE="no")


def test_not_built_gives_the_same_results(tmp_path: Path) -> None:
    copy_of_the_package(tmp_path, None)
    report = in_subprocess("check", PYTHONPATH=str(tmp_path))
    assert not report["loaded"] and report["failures"] == []
    assert len(report["warnings"]) == 1
    assert "not built" in report["warnings"][0] and "pip install" in report["warnings"][0]


def test_broken_library_is_named(tmp_path: Path) -> None:
    copy_of_the_package(tmp_path, b"no library")
    messages = in_subprocess("fallback_warnings", "served", PYTHONPATH=str(tmp_path))
    assert len(messages) == 1 and messages[0].startswith("RuntimeWarning")
    assert "failed to load" in messages[0] and _library.CPU.path.name in messages[0] and "pip install" in messages[0]


@pytest.mark.parametrize(("what", "words"), [("head_dim", "multiples of 8"), ("float64", "float64")])
def test_what_is_not_served_warns_once(native: None, what: str, words: str) -> None:
    messages = in_subprocess("fallback_warnings", what)
    assert len(messages) == 1 and messages[0].startswith("RuntimeWarning") and words in messages[0]


def test_what_is_served_warns_not(native: None) -> None:
    assert in_subprocess("fallback_warnings", "served") == []


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16, FLOAT16, FLOAT64), ids=id_of)
@pytest.mark.parametrize(
    "dims", [(8, 8), (12, 8), (8, 12), (64, 64), (100, 100), (512, 512), (520, 64), (64, 520)], ids=str
)
def test_info_says_what_the_dispatcher_does(native: None, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """`packattn info` and the op itself agree, forward and backward, on which code runs."""
    q = torch.randn(4, 2, dims[0], dtype=dtype, requires_grad=True)
    v = torch.randn(4, 2, dims[1], dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        packattn.attention(q, q.detach(), v, packattn.Packing.from_lengths([3, 1])).sum().backward()
    ran = {event.key for event in trace.key_averages() if event.key.startswith("packattn::")}
    kernel, reasons = info.kernel_for(str(dtype).removeprefix("torch."), *dims)
    assert {"packattn::attention_forward", "packattn::attention_backward"} <= ran
    for direction in ("forward", "backward"):
        assert (f"packattn::attention_{direction}_reference" in ran) == bool(reasons), (kernel, reasons, ran)
    assert kernel.startswith("compiled") == (not reasons)


def test_values_on_other_devices_are_looked_at_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    offsets = torch.tensor([0, 5, 3]).as_subclass(Elsewhere)
    checks.cu_seqlens("op", offsets, 5)
    monkeypatch.setenv("PACKATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="op: cu_seqlens must not decrease, got 5 then 3 at entry 2"):
        checks.cu_seqlens("op", offsets, 5)


def test_why_a_device_has_no_compiled_library() -> None:
    """What the one warning of the fallback says, and what it does not serve."""
    assert "packattn's CUDA kernels are missing, " in _library.missing("cuda")
    assert "device type 'mps'" in _library.missing("mps")
    if torch.version.cuda is None:
        assert _library.CUDA.missing == "this torch is built without CUDA"
    assert _library.refusals("mps", "float32", 12, 12) == []


def test_what_the_cuda_kernels_do_not_serve(native: None) -> None:
    assert _library.refusals("cuda", "bfloat16", 64, 512) == []
    (why,) = _library.refusals("cuda", "float64", 64, 64)
    assert why == "dtype: the CUDA kernels serve float32, bfloat16 and float16, not float64"
    (why,) = _library.refusals("cuda", "float16", 12, 64)
    assert why == "head_dim: the CUDA kernels serve multiples of 8 from 8 to 512, not 12"
