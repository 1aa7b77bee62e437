"""Rounding of long sums: many terms with a mean, where one float32 accumulator for a whole document would drift."""

from __future__ import annotations

import pytest
import torch

import packattn

NAMES = ("out", "dq", "dk", "dv")


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One head, one document, no mask, in plain PyTorch."""
    leaves = [x[:, 0].detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = torch.softmax(leaves[0] @ leaves[1].T * 0.25, -1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, 0].to(dtype))]


@pytest.mark.parametrize("mean", (0.0, 1.0))
def test_error_does_not_grow_with_the_document(mean: float) -> None:
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 3000, 1, 16)
    v, dout = v + mean, dout + mean
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = packattn.attention(*leaves, packattn.Packing.from_lengths([3000]), causal=False, scale=0.25)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    same = plain(q, k, v, dout, torch.float32)
    exact = plain(q, k, v, dout, torch.float64)
    for name, x, y, want in zip(NAMES, ours, same, exact, strict=True):
        error, allowed = ((t - want).abs().max().item() / want.abs().max().item() for t in (x[:, 0], y))
        assert error <= 2 * allowed + 3e-7, f"{name}: {error:.2g}, plain PyTorch {allowed:.2g}"


def test_huge_scores_keep_their_gradients_finite() -> None:
    """lse of scores near 1e30 is rounded by more than any difference of scores; probabilities stay at most 1."""
    torch.manual_seed(0)
    for tokens in (12, 40):
        q, k, v, dout = torch.randn(4, tokens, 1, 16)
        leaves = [x.requires_grad_() for x in (q * 1e15, k * 1e15, v)]
        out = packattn.attention(*leaves, packattn.Packing.from_lengths([tokens]))
        for name, gradient in zip(NAMES[1:], torch.autograd.grad(out, leaves, dout), strict=True):
            assert gradient.isfinite().all(), name
