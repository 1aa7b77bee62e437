"""The sm_90a kernels (PACKATTN_CUDA_KERNEL=sm90): on the emulator, and on a GPU of compute capability 9.0."""

from __future__ import annotations

import math
from dataclasses import replace

import emulated_backend
import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT16, Case, id_of
from helpers import Oracle, assert_same_bits, inputs, of_document
from on_device import ops_of, run_on
from test_bits import poison
from test_bits_on_devices import alone_on
from test_kernels import on_every_schedule, small

import packattn

NAMES = (
    "three_documents",
    "no_tokens",
    "only_zero_length_documents_and_padding",
    "padding_everywhere",
    "skew_bidirectional",
    "short_documents_128",
    "tile_edges_128",
    "row_block_edges_gqa",
    "gqa_8_2",
    "gqa_9_3",
    "dim_40",
    "dim_72_80",
    "dim_192_128",
    "dim_64_128",
    "dim_256",
    "cross_k_longer",
    "cross_k_without_tokens",
    "cross_no_keys",
    "cross_one_query",
    "cross_window",
    "window_both",
    "sinks",
    "softcap",
)


# Documents of at most 64 rows, for which the forward has a launch of its own, among longer ones.
FEW = Case("few_rows", (64, 65, 1, 33, -5, 16), heads=(4, 1), dims=(128, 128), sinks=True)
FEW_ROWS = (
    FEW,
    replace(FEW, name="few_rows_bidirectional", causal=False, layout="sliced", softcap=3.0),
    replace(FEW, name="few_rows_16_heads", q=(5, 65, 1, 17, -70, 3), heads=(16, 1), dims=(64, 64)),
    replace(FEW, name="few_rows_1_head", q=(4, 64, 65, 17, -70, 3), heads=(3, 3), dims=(64, 64)),
    replace(FEW, name="few_rows_window", window=(9, 3), causal=False, heads=(6, 3), layout="transposed"),
    replace(FEW, name="few_rows_many_keys", q=(1, 4, 70, 16), k=(200, 130, 80, 5), heads=(8, 1)),
    replace(FEW, name="few_rows_192_128", q=(1, 20, 70), k=(200, 20, 75), dims=(192, 128), heads=(4, 1)),
    replace(FEW, name="few_rows_256", q=(1, 33, 66), k=(100, 33, 70), dims=(256, 200), heads=(4, 2)),
)


@pytest.fixture
def hopper(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, with the sm_90a kernels asked for."""
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    if device == "emulated":
        monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "90")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    return device


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=id_of)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64_on_hopper(name: str, dtype: torch.dtype, hopper: str) -> None:
    case = small(BY_NAME[name])
    x = inputs(case, dtype)
    Oracle(case, x).check(on_every_schedule(hopper, case, x))


@pytest.mark.parametrize(("case", "dtype"), [*zip(FEW_ROWS, (BFLOAT16, FLOAT16) * 4, strict=True)], ids=id_of)
def test_documents_of_few_rows_on_hopper(case: Case, dtype: torch.dtype, hopper: str) -> None:
    x = inputs(case, dtype)
    Oracle(case, x).check(on_every_schedule(hopper, case, x))


@pytest.mark.parametrize("case", FEW_ROWS, ids=id_of)
def test_packed_is_alone_on_hopper(case: Case, hopper: str) -> None:
    x = inputs(case, BFLOAT16)
    packed = run_on(hopper, case, x)
    for n in range(len(case.documents)):
        assert_same_bits(of_document(case, n, packed), alone_on(hopper, case, n, x), f"document {n} alone and packed")


@pytest.mark.parametrize("case", FEW_ROWS[:3], ids=id_of)
def test_nan_stays_in_its_document_on_hopper(case: Case, hopper: str) -> None:
    x = inputs(case, BFLOAT16)
    clean = run_on(hopper, case, x)
    for n, bad in enumerate(case.documents[:3]):
        y = x
        for name in "qkv":
            start, length = (bad.k_start, bad.k_length) if name in "kv" else (bad.q_start, bad.q_length)
            y = poison(case, y, name, (start, start + length), math.nan)
        dirty = run_on(hopper, case, y)
        assert torch.isnan(of_document(case, n, dirty)["out"]).all()
        for m in range(len(case.documents)):
            if m != n:
                parts = of_document(case, m, dirty), of_document(case, m, clean)
                assert_same_bits(*parts, f"document {m} with NaN in document {n}")


def forward(rows: int, head_stride: int | None = None) -> torch.Tensor:
    """Of one document, with values of the given head stride."""
    tensors = [torch.randn(rows, 2, 64, generator=torch.Generator().manual_seed(i)).to(BFLOAT16) for i in range(3)]
    if head_stride is not None:
        tensors[2] = tensors[2].as_strided((rows, 2, 64), (128, head_stride, 1))
    with ops_of("emulated"):
        out = packattn.attention(*tensors, packattn.Packing.from_lengths([rows]), causal=True)
    return out if isinstance(out, torch.Tensor) else out[0]


def test_which_kernel_runs(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by its grids, on three multiprocessors: sm80 has two blocks on each, sm90 one for the large tiles, which 64
    rows have none of, and three for those of few rows; the tile table is one more. Expanded tensors have no tensor
    map."""
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "90")
    blocks = {}
    for kernel in ("sm80", "sm90"):
        monkeypatch.setenv("PACKATTN_CUDA_KERNEL", kernel)
        for rows, stride in ((64, None), (65, None), (65, 0)):
            emulated_backend.take_blocks()
            forward(rows, stride)
            blocks[kernel, rows, stride] = emulated_backend.take_blocks()
    difference = {call: blocks[("sm90", *call)] - blocks[("sm80", *call)] for call in ((64, None), (65, None), (65, 0))}
    assert difference == {(64, None): 3 * (3 - 2), (65, None): 3 * (3 + 1 - 2), (65, 0): 0}


def blocks_of_backward(head_stride: int) -> int:
    """Blocks that the backward of one document of 70 rows starts, with a dout of this head stride."""
    random = [torch.randn(70, 2, 64, generator=torch.Generator().manual_seed(i)).to(BFLOAT16) for i in range(4)]
    tensors, dout = [x.requires_grad_() for x in random[:3]], random[3].as_strided((70, 2, 64), (128, head_stride, 1))
    with ops_of("emulated"):
        out = packattn.attention(*tensors, packattn.Packing.from_lengths([70]), causal=True)
        emulated_backend.take_blocks()
        torch.autograd.grad(out, tensors, dout)
    return emulated_backend.take_blocks()


def test_which_backward_runs(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: on three multiprocessors, dK and dV and again dQ have two blocks on each with sm80, one with sm90."""
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "90")
    blocks = {}
    for kernel in ("sm80", "sm90"):
        monkeypatch.setenv("PACKATTN_CUDA_KERNEL", kernel)
        blocks[kernel] = [blocks_of_backward(stride) for stride in (64, 0)]
    assert [b - a for a, b in zip(blocks["sm80"], blocks["sm90"], strict=True)] == [2 * 3 * (1 - 2), 0]


def test_other_gpus_have_none(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    case: Case = BY_NAME["three_documents"]
    for capability in ("80", "120"):
        monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", capability)
        with pytest.raises(RuntimeError, match="PACKATTN_CUDA_KERNEL=sm90, but device: sm90 kernels need .* 9.0"):
            run_on("emulated", case, inputs(case, FLOAT16))
