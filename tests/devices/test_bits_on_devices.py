"""Bits on the CUDA kernels: a document alone and packed; NaN and Inf stay where they are; runs repeat."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, Case, id_of
from helpers import Inputs, assert_same_bits, inputs, inputs_of_document, of_document, relaid
from on_device import run_on
from test_bits import ISOLATION, poison, poison_padding

LENGTHS = (1, 70, 0, 3, 129, 33, 2, 17)
BASE = Case("bits", LENGTHS, dims=(64, 64))
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": (37, 0)},
    "window_bidirectional": {"window": (20, 11), "causal": False},
    "chunk": {"chunk": 48},
    "prefix": {"prefix": (0, 30, 0, 1, 129, 5, 1, 9)},
    "128": {"dims": (128, 128), "heads": (2, 1)},
    "96": {"dims": (96, 96), "heads": (1, 1)},
    "256": {"dims": (256, 256), "heads": (1, 1)},
    "192_128": {"dims": (192, 128)},
    "40": {"dims": (40, 40)},
    "gqa": {"heads": (4, 2)},
    "sinks_softcap_gqa": {"sinks": True, "softcap": 3.0, "heads": (4, 1)},
    "padding": {"q": (-5, 1, 70, -3, 129, -1, 30, 17, -40)},
    "padding_bidirectional": {"q": (-5, 1, 70, -3, 129, -1, 30, 17, -40), "causal": False},
    "cross": {"q": (5, 40, 129, 1, 64), "k": (70, 3, 150, 129, 0)},
    "many_short": {"q": (8, 7, 1, 16, 3, 9) * 8, "heads": (4, 4)},
}
BITS = [replace(BASE, name=name, **extra) for name, extra in MASKS.items()]
# float16 takes the code of bfloat16 but for the conversion; float32 is served by the plain kernels.
OTHER_DTYPES = ("causal", "window_bidirectional", "sinks_softcap_gqa", "padding")
BITS_DTYPES = [(c, d) for c in BITS for d in (BFLOAT16, FLOAT16, FLOAT32) if d == BFLOAT16 or c.name in OTHER_DTYPES]


def alone_on(device: str, case: Case, n: int, x: Inputs) -> dict[str, torch.Tensor]:
    results = run_on(device, case.alone(n), inputs_of_document(case, n, x))
    results.pop("dsinks", None)  # a sum over all documents
    return results


@pytest.mark.parametrize(("case", "dtype"), BITS_DTYPES, ids=id_of)
def test_packed_is_alone_on_device(case: Case, dtype: torch.dtype, device: str) -> None:
    x = inputs(case, dtype)
    packed = run_on(device, case, x)
    seen = {(d.q_length, d.k_length): n for n, d in enumerate(case.documents)}  # one of each shape
    for n in seen.values():
        alone = alone_on(device, case, n, x)
        assert_same_bits(of_document(case, n, packed), alone, f"document {n} alone and packed")


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
def test_place_and_neighbours_change_no_bit_on_device(dtype: torch.dtype, device: str) -> None:
    """The same document at many offsets, among other neighbours, in totals that are odd."""
    one = Case("one", (75,), dims=(64, 64), heads=(4, 2))
    x = inputs(one, dtype)
    expected = run_on(device, one, x)
    for before, after in (((3,), ()), ((64, 0, 1), (130,)), ((-7, 129), (-1, 5)), ((1,) * 33, (8,) * 9)):
        case = replace(one, q=(*before, 75, *after))
        y = inputs(case, dtype, seed=1)
        y = replace(y, q=relaid(y.q), k=relaid(y.k), v=relaid(y.v), dout=relaid(y.dout))
        n = sum(m >= 0 for m in before)
        part = inputs_of_document(case, n, y)
        for name in ("q", "k", "v", "dout", "dlse"):
            getattr(part, name).copy_(getattr(x, name))
        assert_same_bits(of_document(case, n, run_on(device, case, y)), expected, f"after {before}, before {after}")


@pytest.mark.parametrize("name", ("skew", "sinks_softcap_window", "dim_192_128"))
def test_runs_change_no_bit(name: str, device: str) -> None:
    case = BY_NAME[name]
    x = inputs(case, BFLOAT16)
    assert_same_bits(run_on(device, case, x), run_on(device, case, x), "two runs")


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16, FLOAT32), ids=id_of)
@pytest.mark.parametrize("case", ISOLATION, ids=id_of)
def test_nan_and_inf_stay_in_their_document_on_device(case: Case, dtype: torch.dtype, device: str) -> None:
    if dtype == FLOAT16 and case.name not in ("causal", "bidirectional", "short"):
        pytest.skip("the code of bfloat16 but for the conversion")
    x = inputs(case, dtype)
    clean = run_on(device, case, x)
    parts = [of_document(case, n, clean) for n in range(len(case.documents))]
    largest = 3.0e38 if dtype != FLOAT16 else 6.0e4
    for n, value in ((1, math.nan), (2, math.inf), (3, -math.inf), (0, math.nan), (4, largest)):
        d = case.documents[n]
        y = x
        for name in ("q", "k", "v", "dout", "dlse"):
            start, length = (d.k_start, d.k_length) if name in "kv" else (d.q_start, d.q_length)
            y = poison(case, y, name, (start, start + length), value)
        dirty = run_on(device, case, y)
        assert not math.isnan(value) or torch.isnan(of_document(case, n, dirty)["out"]).any()
        for m in range(len(case.documents)):
            if m != n:
                assert_same_bits(of_document(case, m, dirty), parts[m], f"document {m} with {value} in document {n}")


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "dlse"))
@pytest.mark.parametrize("case", ISOLATION[:3], ids=id_of)
def test_nan_in_one_tensor_stays_in_its_document_on_device(case: Case, name: str, device: str) -> None:
    x = inputs(case, BFLOAT16)
    clean = run_on(device, case, x)
    d = case.documents[1]
    dirty = run_on(device, case, poison(case, x, name, (d.q_start, d.q_start + d.q_length), math.nan))
    assert any(torch.isnan(t).any() for t in of_document(case, 1, dirty).values()), "the NaN must show where it is"
    for m in (0, 2, 3, 4):
        assert_same_bits(of_document(case, m, dirty), of_document(case, m, clean), f"document {m}")


@pytest.mark.parametrize("value", (math.nan, math.inf), ids=str)
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
def test_nan_in_padding_goes_nowhere_on_device(dtype: torch.dtype, value: float, device: str) -> None:
    """Padding holds anything: its own results are 0 and -inf, and no other bit changes."""
    case = replace(BY_NAME["padding_everywhere"], sinks=True)
    x = inputs(case, dtype)
    assert_same_bits(run_on(device, case, poison_padding(case, x, value)), run_on(device, case, x), "padding")


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
@pytest.mark.parametrize("name", ("q", "k", "v"))
def test_future_of_its_own_document_is_not_seen_on_device(name: str, dtype: torch.dtype, device: str) -> None:
    """Causal: what finite numbers stand after a row changes no bit of its out."""
    case = Case("causal", (150,), dims=(64, 64))
    x = inputs(case, dtype)
    expected = run_on(device, case, x)
    got = run_on(device, case, poison(case, x, name, (91, 150), 7.0))
    assert torch.equal(got["out"][:91], expected["out"][:91])
    assert torch.equal(got["lse"][:, :91], expected["lse"][:, :91])
