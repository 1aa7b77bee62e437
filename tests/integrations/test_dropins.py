"""The functions with other libraries' signatures: same arguments, same results, refusals with reasons."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import packattn
from packattn import dropins
from packattn.verify.expected import Formula, expected_mask

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1), (4, 2, 3, 1)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def spans(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = offsets(lengths).tolist()
    return list(itertools.pairwise(ends))


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS_Q), 4, 16), (sum(LENGTHS_K), 2, 16), (sum(LENGTHS_K), 2, 16))
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (0, 0), (None, 1)])
def test_flash_attn_varlen_func(causal: bool, window: tuple[int | None, int | None]) -> None:
    q, k, v = inputs()
    out, lse, probabilities = packattn.flash_attn_varlen_func(
        q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 4, 0.0, 0.3, causal, window, 7.0, None, True, True, None
    )
    plain = tuple(-1 if n is None else n for n in window)
    mask = expected_mask(spans(LENGTHS_Q), spans(LENGTHS_K), q.shape[0], k.shape[0], causal=causal, window_size=plain)
    want, want_lse = Formula(mask, 0.3, 7.0)(q, k, v)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert probabilities is None
    got = torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), (q, k, v))
    for g, w in zip(
        got, torch.autograd.grad(want.square().sum() + want_lse[lse.isfinite()].sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_flash_attn_varlen_func_without_lengths_and_with_sinks() -> None:
    q, k, v = inputs()
    sinks = torch.randn(4)
    out = packattn.flash_attn_varlen_func(q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), causal=True, s_aux=sinks)
    mask = expected_mask(spans(LENGTHS_Q), spans(LENGTHS_K), q.shape[0], k.shape[0])
    torch.testing.assert_close(out, Formula(mask, 0.25, sinks=sinks)(q, k, v)[0])


def test_flash_attn_func() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=g) for n, h in ((3, 4), (5, 2), (5, 2)))
    out, lse, _ = dropins.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 4, 3)
    mask = expected_mask(spans((3, 3)), spans((5, 5)), 6, 10)
    want, want_lse = Formula(mask, 0.25)(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    torch.testing.assert_close(out.flatten(0, 1), want)
    torch.testing.assert_close(lse.transpose(0, 1).flatten(1), want_lse)
    with pytest.raises(ValueError, match="q must be 4-D"):
        dropins.flash_attn_func(q[0], k, v)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    q, k, v = inputs()
    out, lse = packattn.varlen_attn(
        q,
        k,
        v,
        offsets(LENGTHS_Q),
        offsets(LENGTHS_K),
        5,
        4,
        return_aux=SimpleNamespace(lse=True),
        scale=0.3,
        window_size=window,
        enable_gqa=True,
    )
    mask = expected_mask(spans(LENGTHS_Q), spans(LENGTHS_K), q.shape[0], k.shape[0], causal=False, window_size=window)
    want, want_lse = Formula(mask, 0.3)(q, k, v)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_signature_is_that_of_torch() -> None:
    torch_varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    theirs, ours = (inspect.signature(f).parameters for f in (torch_varlen.varlen_attn, packattn.varlen_attn))
    for name, parameter in theirs.items():
        assert name in ours, f"torch {torch.__version__} has {name}"
        assert ours[name].kind == parameter.kind
    assert list(theirs) == [n for n in ours if n in theirs], "in the same order"


def test_signature_is_that_of_flash_attn() -> None:
    """flash-attn 2.8; the package is not installable without a GPU."""
    names = [
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "alibi_slopes",
        "deterministic",
        "return_attn_probs",
        "block_table",
    ]
    assert list(inspect.signature(packattn.flash_attn_varlen_func).parameters)[: len(names)] == names


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("flash_attn_varlen_func", {"dropout_p": 0.1}, "dropout_p cannot be honoured"),
        ("flash_attn_varlen_func", {"alibi_slopes": torch.ones(4)}, "alibi_slopes cannot be honoured"),
        ("flash_attn_varlen_func", {"block_table": torch.ones(4, 1)}, "block_table cannot be honoured"),
        ("flash_attn_varlen_func", {"window_size": (1,)}, "window_size must be"),
        ("varlen_attn", {"seqused_k": torch.ones(4)}, "seqused_k cannot be honoured"),
        ("varlen_attn", {"block_table": torch.ones(4, 1)}, "block_table cannot be honoured"),
        ("varlen_attn", {"enable_gqa": False}, "unless enable_gqa=True"),
    ],
)
def test_refusals(function: str, arguments: dict[str, Any], message: str) -> None:
    if function == "varlen_attn":
        arguments = {"enable_gqa": True, **arguments}
    with pytest.raises(ValueError, match=message):
        getattr(packattn, function)(*inputs(), offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 4, **arguments)


def test_offsets_are_checked() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="cu_seqlens_q must be offsets up to total = 9"):
        packattn.flash_attn_varlen_func(q, k, v, offsets((3, 0, 5, 2)), offsets(LENGTHS_K), 5, 4)
    with pytest.raises(ValueError, match="cu_seq_k must be offsets"):
        packattn.varlen_attn(q, k, v, offsets(LENGTHS_Q), None, 5, 4, enable_gqa=True)


def test_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def both(cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
        one = packattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 4, causal=True)
        return one + packattn.varlen_attn(q, k, v, cu_q, cu_k, 5, 4, enable_gqa=True)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(offsets(LENGTHS_Q), offsets(LENGTHS_K)), both(offsets(LENGTHS_Q), offsets(LENGTHS_K))
    )


def test_as_a_hub_kernel_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers wraps any module that has flash_attn_varlen_func; here packattn.dropins comes from the "hub"."""
    pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")
    from families import FAMILIES, documents, positions
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention, hub_kernels
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    name = "example/packattn"
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *a, **k: dropins)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *a, **k: True)
    monkeypatch.setattr(hub_kernels, "get_attn_kernel_version", lambda *a, **k: None)
    assert hub_kernels.load_and_register_attn_kernel(name, allow_all_kernels=True) is dropins
    assert AttentionInterface()[name] is flash_attention.flash_attention_forward
    lazy_import_flash_attention(name, allow_all_kernels=True)

    lengths = (5, 4)
    for family in ("llama", "mistral"):
        model = FAMILIES[family].build("eager")
        model.config._attn_implementation = name
        docs = documents(lengths)
        packed = model(torch.cat(docs)[None], position_ids=positions(lengths)[None], use_cache=False).logits[0]
        oracle = FAMILIES[family].build("eager")
        alone = torch.cat([oracle(d[None]).logits[0] for d in docs])
        torch.testing.assert_close(packed, alone, rtol=2e-4, atol=2e-5)
