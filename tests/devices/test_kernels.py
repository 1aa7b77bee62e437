"""The table of cases against float64 on the CUDA kernels: plain and tensor-core, forward and backward, every schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import emulated_backend
import pytest
import torch
from cases import BFLOAT16, BY_NAME, CASES, FLOAT16, FLOAT32, Case, id_of
from helpers import Inputs, Oracle, assert_same_bits, inputs, make
from on_device import copied, moved, ops_of, run_on

import packattn
from packattn import _library

HALF = (BFLOAT16, FLOAT16)


def small(case: Case) -> Case:
    """The case with documents that the emulator gets through in a second, whatever they were."""
    longest = 2 * math.isqrt(100_000 // (case.heads[0] * max(case.dims)) * 16)
    cut = {n: min(abs(n), longest) * (1 if n > 0 else -1) for n in {*case.q, *case.k_runs}}
    return replace(
        case,
        q=tuple(cut[n] for n in case.q[:80]),
        k=None if case.k is None else tuple(cut[n] for n in case.k[:80]),
    )


TABLE = [small(case) for case in CASES if not case.slow]
# Every case in both 16-bit types; in float32, which the plain kernels serve, the shorter ones.
CASES_AND_DTYPES = [(case, dtype) for case in TABLE for dtype in case.dtypes if dtype in HALF]
CASES_AND_DTYPES += [(case, FLOAT32) for case in TABLE if case.total_q * case.heads[0] * max(case.dims) <= 20_000]


def schedules(device: str) -> tuple[tuple[int, int], ...]:
    return emulated_backend.SCHEDULES if device == "emulated" else ((0, 0),)


def on_every_schedule(device: str, case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    """The results, which no order of threads and blocks may change."""
    first: dict[str, torch.Tensor] = {}
    for seed, policy in schedules(device):
        if device == "emulated":
            emulated_backend.schedule(seed, policy)
            emulated_backend.take_blocks()
        got = run_on(device, case, x)
        if device == "emulated" and case.total_q + case.total_k > 0:
            assert emulated_backend.take_blocks() > 0, "no kernel ran"
        first = first or got
        assert_same_bits(got, first, f"schedule {policy}")
    return first


@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES, ids=id_of)
def test_against_float64_on_device(case: Case, dtype: torch.dtype, device: str) -> None:
    x = inputs(case, dtype)
    got = on_every_schedule(device, case, x)
    assert got["out"].dtype == dtype and got["lse"].dtype == FLOAT32
    Oracle(case, x).check(got)


@pytest.mark.parametrize("dtype", HALF, ids=id_of)
@pytest.mark.parametrize(
    "name", ("three_documents", "padding_everywhere", "gqa_9_3", "dim_192_128", "sinks", "softcap", "cross_window")
)
def test_plain_kernels_serve_16_bits_too(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "plain")
    case = small(BY_NAME[name])
    x = inputs(case, dtype)
    Oracle(case, x).check(run_on(device, case, x))


@pytest.mark.parametrize("capability", (86, 90, 120))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (192, 128), (256, 256)), ids=str)
def test_tiles_of_other_gpus(
    dims: tuple[int, int], capability: int, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory of 99 KB leads to other tiles than 163 KB."""
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", str(capability))
    case = replace(BY_NAME["tile_edges"], q=(65, 1, 33, 130), dims=dims, heads=(2, 1), sinks=True)
    x = inputs(case, BFLOAT16)
    Oracle(case, x).check(run_on("emulated", case, x))


def test_old_gpus_take_the_plain_kernels(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "75")
    case = BY_NAME["three_documents"]
    x = inputs(case, FLOAT16)
    Oracle(case, x).check(run_on("emulated", case, x))
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm80")
    with pytest.raises(RuntimeError, match="attention_forward: PACKATTN_CUDA_KERNEL=sm80, but device: .* has 7.5"):
        run_on("emulated", case, x)


@pytest.mark.parametrize("dtype", (*HALF, FLOAT32), ids=id_of)
def test_gradient_of_a_sum_on_device(dtype: torch.dtype, device: str) -> None:
    """A gradient of stride 0 in every dimension, and none of lse."""
    case = small(BY_NAME["skew"])
    x = inputs(case, dtype)
    x.dout, x.dlse = torch.ones(()).to(dtype).expand(x.dout.shape), torch.zeros_like(x.dlse)
    Oracle(case, x).check(run_on(device, case, x))


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
@pytest.mark.parametrize("name", ("skew", "sinks_softcap_window", "cross_k_shorter"))
def test_gradient_through_lse_only_on_device(name: str, dtype: torch.dtype, device: str) -> None:
    case = small(BY_NAME[name])
    x = inputs(case, dtype)
    x.dout = torch.zeros_like(x.dout)
    got = run_on(device, case, x)
    assert not got["dv"].any()
    Oracle(case, x).check(got)


def test_copies_for_a_gpu_are_laid_out_as_the_originals() -> None:
    numbers = torch.arange(200, dtype=FLOAT32)
    for t in (numbers[3:63].view(20, 3), numbers[:60].view(3, 20).t(), numbers[5:].as_strided((4, 3), (0, 2))):
        copy = copied(t, "cpu")
        assert torch.equal(copy, t) and copy.stride() == t.stride()
        assert copy.data_ptr() % 16 == t.data_ptr() % 16 and copy.data_ptr() != t.data_ptr()


@pytest.mark.parametrize("offset", (1, 3, 8))
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
def test_addresses_at_no_multiple_of_16_bytes(dtype: torch.dtype, offset: int, device: str) -> None:
    """A contiguous tensor may begin anywhere, and rows may be any distance apart; kernels copy 16 bytes at a time."""
    case = Case("shifted", (30, 21), heads=(2, 2), dims=(64, 64))
    x = inputs(case, dtype)
    wide = torch.zeros(51, 2 * 64 + offset, dtype=dtype)
    for name in ("q", "k", "v", "dout"):
        t = getattr(x, name)
        flat = torch.zeros(t.numel() + offset, dtype=dtype)[offset:].view(t.shape)
        setattr(x, name, flat.copy_(t) if name != "k" else wide.clone()[:, offset:].view(51, 2, 64).copy_(t))
    assert x.q.data_ptr() % 16 or offset == 8
    plain = Inputs(x.q.clone(), x.k.contiguous(), x.v.clone(), None, x.dout.clone(), x.dlse)
    assert_same_bits(run_on(device, case, x), run_on(device, case, plain), "aligned and not")


@pytest.mark.parametrize("strides", ((1, 64, 1), (3, 1, 1), (1, 5, 1), (0, 1, 1), (1, 0, 1)), ids=str)
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
def test_windows_over_a_signal(dtype: torch.dtype, strides: tuple[int, ...], device: str) -> None:
    """Tensors that overlap themselves, at no multiple of 16 bytes: the copy that is made has rows of its own."""
    case = Case("overlapping", (20,), heads=(3, 3), dims=(64, 64))
    x = inputs(case, dtype)
    signal = x.q.flatten()[:600]
    windows = {name: signal[i:].as_strided((20, 3, 64), strides) for i, name in enumerate(("q", "k", "v", "dout"))}
    dense = {name: torch.empty(20, 3, 64, dtype=dtype).copy_(t) for name, t in windows.items()}
    got, expected = (run_on(device, case, replace(x, **tensors)) for tensors in (windows, dense))
    assert_same_bits(got, expected, "windows and their copies")


def test_strides_of_a_single_head_or_row_are_not_read(device: str) -> None:
    case = Case("single", (40,), heads=(1, 1), dims=(64, 64))
    x = inputs(case, BFLOAT16)
    odd = [torch.empty(40 * 64, dtype=BFLOAT16).as_strided((40, 1, 64), (64, 7, 1)).copy_(t) for t in (x.q, x.k, x.v)]
    y = replace(x, q=odd[0], k=odd[1], v=odd[2])
    assert_same_bits(run_on(device, case, y), run_on(device, case, x), "stride of a single head")


def test_what_no_kernel_serves_is_computed_all_the_same(device: str) -> None:
    for name in ("dim_12_falls_back", "dim_16_5_falls_back", "dim_520_falls_back"):
        case = BY_NAME[name]
        x = inputs(case, FLOAT32)
        Oracle(case, x).check(run_on(device, case, x))
    x = inputs(BY_NAME["sinks"], torch.float64)
    got = run_on(device, BY_NAME["sinks"], x)
    assert got["out"].dtype == torch.float64
    Oracle(BY_NAME["sinks"], x).check(got)


@pytest.mark.parametrize("dtype", (*HALF, FLOAT32), ids=id_of)
def test_infinite_sinks_on_device(dtype: torch.dtype, device: str) -> None:
    """A sink of +inf takes all the weight, one of -inf none."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (make(40, 2, 64, "contiguous", dtype, generator) for _ in range(3))
    case = Case("sinks", (40,), dims=(64, 64), sinks=True)
    x = Inputs(q, k, v, torch.tensor([math.inf, -math.inf]), torch.ones_like(v), torch.zeros(2, 40))
    got = run_on(device, case, x)
    without = run_on(device, replace(case, sinks=False), replace(x, sinks=None))
    assert not got["out"][:, 0].any() and torch.isposinf(got["lse"][0]).all()
    assert torch.equal(got["out"][:, 1], without["out"][:, 1]) and torch.equal(got["lse"][1], without["lse"][1])
    for name in ("dq", "dk", "dv"):
        assert not got[name][:, 0].any() and torch.equal(got[name][:, 1], without[name][:, 1])


@pytest.mark.parametrize("dtype", (*HALF, FLOAT32), ids=id_of)
@pytest.mark.parametrize("seed", range(3))
def test_any_ranges_stay_inside_the_buffers(seed: int, dtype: torch.dtype, emulator: None) -> None:
    """int32 values of any kind: the emulator knows every buffer, and throws at an access outside or a word never written."""
    generator = torch.Generator().manual_seed(seed)
    extreme = torch.tensor([0, 1, -1, 50, 64, 2**31 - 1, -(2**31), 63, 49])
    emulated_backend.schedule(seed, seed % 3)
    with ops_of("emulated") as ops:
        for rows, keys in ((64, 50), (1, 130), (200, 7), (5, 0)):
            if seed == 0:
                begin, end = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).int()
            elif seed == 1:
                begin, end = extreme[torch.randint(len(extreme), (2, rows), generator=generator)].int()
            else:
                begin = torch.randint(-3, keys + 3, (rows,), generator=generator).int()
                end = begin + torch.randint(-2, 40, (rows,), generator=generator).int()
            q, k, v = (make(t, 2, 64, "contiguous", dtype, generator) for t in (rows, keys, keys))
            out, lse = ops.attention_forward(q, k, v, begin, end, None, 0.125, 0.0)
            grads = ops.attention_backward(torch.ones_like(out), None, q, k, v, out, lse, begin, end, None, 0.125, 0.0)
            nothing = torch.maximum(begin, begin.new_zeros(())) >= torch.minimum(end, end.new_tensor(keys))
            assert torch.isneginf(lse[:, nothing]).all() and not out[nothing].any() and not grads[0][nothing].any()


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT32), ids=id_of)
def test_more_keys_than_kernels_count(dtype: torch.dtype, device: str) -> None:
    """An expanded tensor has them in no memory. Kernels count in int32, past the last key."""
    q = moved(torch.zeros(1, 1, 64, dtype=dtype), device)
    row = moved(torch.zeros(1, dtype=torch.int32), device)
    many = q.expand(2**31 - 1, 1, 64)
    with ops_of(device) as ops, pytest.raises(RuntimeError, match=r"^attention_forward: total_k must be in \[0, \d+\]"):
        ops.attention_forward(q, many, many, row, row, None, 1.0, 0.0)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16", "float64"))
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (64, 64), (96, 80), (192, 128), (256, 264), (512, 512), (520, 64)])
def test_info_says_what_the_op_does(dims: tuple[int, int], dtype: str, emulator: None) -> None:
    """What the deciding function refuses, the reference computes; what it lets pass, a kernel does."""
    q, v = (torch.randn(4, 1, d).to(getattr(torch, dtype)) for d in dims)
    refused = bool(_library.extension.cuda_refusals(dtype, *dims))
    emulated_backend.take_blocks()
    with ops_of("emulated"):
        packing = packattn.Packing.from_lengths([3, 1])
        key_begin, key_end = packing.key_ranges()
        emulated_backend.take_blocks()
        torch.ops.packattn.attention_forward(q, q, v, key_begin, key_end, None, 1.0, 0.0)
    assert (emulated_backend.take_blocks() == 0) == refused
