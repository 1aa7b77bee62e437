"""The attention function under test, with the inputs it is tested on."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..packing import Packing
from .report import Spans, difference, dtype_name, magnitude, plural, spans_of

AttentionFunction = Callable[..., Any]


@dataclasses.dataclass
class Setup:
    """The inputs of the check, on its device."""

    documents: Spans
    documents_k: Spans
    packing: Packing
    packing_k: Packing | None
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor  # [Hq, Tq]
    scale: float
    other_q: Tensor  # what inputs are replaced by
    other_k: Tensor
    other_v: Tensor
    other_dout: Tensor


def make_setup(
    lengths: Sequence[int] | Packing,
    lengths_k: Sequence[int] | Packing | None,
    tail: int,
    heads: tuple[int, int],
    head_dim: int,
    head_dim_v: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    scale: float | None,
    seed: int,
) -> Setup:
    packing, documents = _pack("lengths", lengths, tail, device)
    packing_k, documents_k = (None, documents) if lengths_k is None else _pack("lengths_k", lengths_k, tail, device)
    if len(documents_k) != len(documents):
        raise ValueError(f"lengths_k must have as many documents as lengths, {len(documents)}, got {len(documents_k)}")
    filled_q = [n for n, (start, end) in enumerate(documents) if start < end]
    filled_k = [n for n, (start, end) in enumerate(documents_k) if start < end]
    if not any(a != b for a in filled_q for b in filled_k):
        raise ValueError(
            "lengths must hold two documents between which something could leak, got tokens in "
            f"{plural(len(filled_q), 'document')} of queries and {len(filled_k)} of keys"
        )
    heads_q, heads_k = heads
    if heads_k < 1 or heads_q < 1 or heads_q % heads_k:
        raise ValueError(f"heads must be (Hq, Hkv) with Hq a multiple of Hkv, got {heads}")
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype_name(dtype)}")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    total_q, total_k = packing.total, (packing if packing_k is None else packing_k).total
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, other_q = draw(total_q, heads_q, head_dim), draw(total_q, heads_q, head_dim)
    # Every query points along the first axis, so that a key moved along it changes every row's weights by far: a key
    # that is seen cannot go unnoticed in a low precision. Small keys keep the weights even.
    q[..., 0] = q[..., 0].abs() + 1
    other_q[..., 0] = other_q[..., 0].abs() + 1
    k = draw(total_k, heads_k, head_dim) / 2
    other_k = k.clone()
    other_k[..., 0] += min(4 / abs(scale), 1000.0) if scale else 1.0
    v = draw(total_k, heads_k, head_dim_v)
    other_v = -v - 4 * v.sign()

    def place(x: Tensor) -> Tensor:
        return x.to(device=device, dtype=dtype)

    return Setup(
        documents=documents,
        documents_k=documents_k,
        packing=packing,
        packing_k=packing_k,
        q=place(q),
        k=place(k),
        v=place(v),
        dout=place(draw(total_q, heads_q, head_dim_v)),
        dlse=draw(heads_q, total_q).to(device=device, dtype=torch.float32),
        scale=scale,
        other_q=place(other_q),
        other_k=place(other_k),
        other_v=place(other_v),
        other_dout=place(draw(total_q, heads_q, head_dim_v)),
    )


def _pack(name: str, lengths: Sequence[int] | Packing, tail: int, device: torch.device | str) -> tuple[Packing, Spans]:
    if isinstance(lengths, Packing):
        return lengths.to(device), tuple((rows.start, rows.stop) for rows in lengths.documents())
    counts = [operator.index(length) for length in lengths]
    if min(counts, default=0) < 0 or tail < 0:
        raise ValueError(f"{name} and tail must not be negative, got {counts} and {tail}")
    return Packing.from_lengths(counts, total=sum(counts) + tail, device=device), spans_of(counts)


class Subject:
    """The function under test with its inputs."""

    def __init__(self, fn: AttentionFunction, setup: Setup) -> None:
        self.fn = fn
        self.setup = setup
        self.out: Tensor  # of the unchanged inputs, without gradients
        self.lse: Tensor | None
        self.lse_differentiable = False

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        keywords = {} if self.setup.packing_k is None else {"packing_k": self.setup.packing_k}
        result = self.fn(q, k, v, self.setup.packing, **keywords)
        if isinstance(result, (tuple, list)) and result:
            return result[0], result[1] if len(result) > 1 else None
        return result, None

    def forward(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        s = self.setup
        with torch.no_grad():
            # Copies, so that a function that writes into its inputs does not spoil the next call.
            return self.call(*((old if new is None else new).clone() for new, old in ((q, s.q), (k, s.k), (v, s.v))))

    def first_call(self) -> list[str]:
        """Shapes and dtypes of what fn returns, and whether it is the same every time: the problems."""
        s = self.setup
        inputs = [x.clone() for x in (s.q, s.k, s.v)]
        with torch.no_grad():
            out, lse = self.call(*inputs)
        wanted = (s.q.shape[0], s.q.shape[1], s.v.shape[2])
        if not isinstance(out, Tensor):
            return [f"fn must return out or (out, lse), got {type(out).__name__}"]
        if tuple(out.shape) != wanted:
            padding = wanted[0] - s.documents[-1][1]
            hint = ""
            if padding and out.shape[:1] == (wanted[0] - padding,):
                hint = (
                    f": the {padding} rows after the last document are missing (tail=0 for a function without padding)"
                )
            return [f"out must be [Tq, Hq, Dv] = {list(wanted)}, got {list(out.shape)}{hint}"]
        problems = []
        if out.dtype != s.q.dtype:
            problems.append(
                f"out must have the dtype of the inputs, {dtype_name(s.q.dtype)}, got {dtype_name(out.dtype)}"
            )
        if lse is not None and (not isinstance(lse, Tensor) or tuple(lse.shape) != (wanted[1], wanted[0])):
            got = list(lse.shape) if isinstance(lse, Tensor) else type(lse).__name__
            return [*problems, f"lse must be [Hq, Tq] = {[wanted[1], wanted[0]]}, got {got}"]
        for name, new, old in zip("qkv", inputs, (s.q, s.k, s.v), strict=True):
            if difference(new, old).any():
                problems.append(f"fn writes into its argument {name}")
        self.out, self.lse = out.clone(), None if lse is None else lse.clone()
        noise = self.forward_noise()
        if noise:
            problems.append(not_deterministic(noise))
        return problems

    def differentiable(self) -> bool:
        s = self.setup
        out, lse = self.call(*(x.clone().requires_grad_(True) for x in (s.q, s.k, s.v)))
        self.lse_differentiable = lse is not None and lse.requires_grad
        return out.requires_grad

    def gradients(
        self,
        dout: Tensor,
        dlse: Tensor,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv for one new forward (compiled functions cannot run backward twice); dlse [Hq, Tq] where lse has one."""
        s = self.setup
        leaves = [
            (old if new is None else new).clone().requires_grad_(True) for new, old in ((q, s.q), (k, s.k), (v, s.v))
        ]
        out, lse = self.call(*leaves)
        outputs, grads = [out], [dout.clone()]
        if lse is not None and lse.requires_grad:
            outputs.append(lse)
            grads.append(dlse.to(lse))
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        dq, dk, dv = (
            torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)
        )
        return dq, dk, dv

    def full_dlse(self) -> Tensor:
        """A gradient for every lse that is finite."""
        finite = torch.ones_like(self.setup.dlse, dtype=torch.bool) if self.lse is None else self.lse.isfinite()
        return self.setup.dlse.masked_fill(~finite, 0.0)

    def forward_noise(self, runs: int = 3) -> float:
        """The largest difference between runs on the same inputs."""
        noise = 0.0
        for _ in range(runs):
            out, lse = self.forward()
            noise = max(noise, difference(out, self.out).max().item())
            if lse is not None and self.lse is not None:
                noise = max(noise, difference(lse, self.lse).max().item())
        return noise

    def backward_noise(self, runs: int = 3) -> float:
        """The same for dq, dk and dv."""
        first = self.gradients(self.setup.dout, self.full_dlse())
        noise = 0.0
        for _ in range(runs):
            again = self.gradients(self.setup.dout, self.full_dlse())
            noise = max(noise, *(difference(a, b).max().item() for a, b in zip(first, again, strict=True)))
        return noise


def not_deterministic(noise: float) -> str:
    return (
        f"fn is not deterministic: calls with the same inputs differ by {magnitude(noise)}; influence cannot be told from "
        "that"
    )
