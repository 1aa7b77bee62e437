"""Peak memory of forward and backward: linear in tokens, no scores, no per-document copies."""

from __future__ import annotations

import json
import sys

import pytest
from worker import in_subprocess

MIB = 1 << 20
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("16x4096", [4096] * 16),
        ("mixed", [4096, 100, 3000, 892] * 8 + [8] * 64),
        ("1024x64", [64] * 1024),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_documents_up_to_4096(name: str, lengths: list[int], native: None) -> None:
    lengths = [*lengths, 65536 - sum(lengths)] if sum(lengths) < 65536 else lengths
    while lengths[-1] > 4096:
        lengths[-1:] = [4096, lengths[-1] - 4096]
    report = in_subprocess("peak_memory", json.dumps(lengths))
    assert report["above"] <= 128 * MIB, f"{name}: {report['above'] / MIB:.0f} MiB above inputs, outputs and gradients"


@pytest.mark.slow
@LINUX
def test_one_document_of_65536(native: None) -> None:
    report = in_subprocess("peak_memory", json.dumps([65536]), timeout=1800)
    assert report["above"] <= report["q"], f"{report['above'] / MIB:.0f} MiB above inputs, outputs and gradients"


@LINUX
def test_no_growth(native: None) -> None:
    """Calls of other sizes and head dims, again and again, leave no scratch behind."""
    report = in_subprocess("memory_after_many_calls")
    assert report["later"] - report["early"] <= 8 * MIB, report


@LINUX
def test_threads_do_not_multiply_the_sums_of_the_query_gradient(native: None) -> None:
    """In 16-bit dtypes they are float32 buffers: one for each kv head of a long document, not one for each thread."""
    report = in_subprocess("address_space_of_backward", OMP_WAIT_POLICY="PASSIVE")
    assert report["added"] <= 3 * report["sums"], report
