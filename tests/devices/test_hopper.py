"""The sm_90a forward (PACKATTN_CUDA_KERNEL=sm90): on the emulator, and on a GPU of compute capability 9.0."""

from __future__ import annotations

import emulated_backend
import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT16, Case, id_of
from helpers import Oracle, inputs
from on_device import ops_of, run_on
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
    "gqa_9_3",
    "dim_40",
    "dim_72_80",
    "dim_192_128",
    "dim_64_128",
    "dim_256",
    "cross_k_longer",
    "cross_k_without_tokens",
    "cross_no_keys",
    "cross_window",
    "window_both",
    "sinks",
    "softcap",
)


@pytest.fixture
def hopper(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, with the sm_90a forward asked for."""
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    if device == "emulated":
        monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "90")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    return device


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=id_of)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64_on_hopper(name: str, dtype: torch.dtype, hopper: str) -> None:
    """The backward, which is sm80's, takes out and lse from this forward."""
    case = small(BY_NAME[name])
    x = inputs(case, dtype)
    Oracle(case, x).check(on_every_schedule(hopper, case, x))


def forward(head_stride: int | None = None) -> torch.Tensor:
    """Of one document, with values of the given head stride."""
    tensors = [torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(i)).to(BFLOAT16) for i in range(3)]
    if head_stride is not None:
        tensors[2] = tensors[2].as_strided((40, 2, 64), (128, head_stride, 1))
    with ops_of("emulated"):
        out = packattn.attention(*tensors, packattn.Packing.from_lengths([40]), causal=True)
    return out if isinstance(out, torch.Tensor) else out[0]


def test_which_kernel_runs(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by its grid: one block on each of the three multiprocessors, where sm80 has two; the tile table is one more.
    Expanded tensors have no tensor map."""
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "90")
    blocks = {}
    for kernel in ("sm80", "sm90"):
        monkeypatch.setenv("PACKATTN_CUDA_KERNEL", kernel)
        for stride in (None, 0):
            emulated_backend.take_blocks()
            forward(stride)
            blocks[kernel, stride] = emulated_backend.take_blocks()
    assert blocks["sm80", None] - blocks["sm90", None] == 3
    assert blocks["sm90", 0] == blocks["sm80", 0]


def test_other_gpus_have_none(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    case: Case = BY_NAME["three_documents"]
    for capability in ("80", "120"):
        monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", capability)
        with pytest.raises(RuntimeError, match="PACKATTN_CUDA_KERNEL=sm90, but device: sm90 kernels need .* 9.0"):
            run_on("emulated", case, inputs(case, FLOAT16))
