"""packattn and its peers, each in the layout it likes best, as calls that can be checked and timed.

Everything a training loop prepares once per batch (packings, masks, padded copies) is made outside the timed calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import packattn
from configurations import Configuration


@dataclass
class Inputs:
    """Packed tensors: query and dout [T, Hq, D], key and value [T, Hkv, D], in the configuration's dtype."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor

    @classmethod
    def random(cls, configuration: Configuration) -> Inputs:
        generator = torch.Generator(configuration.device).manual_seed(0)
        dtype = getattr(torch, configuration.dtype)

        def draw(heads: int, dim: int) -> Tensor:
            shape = (configuration.tokens, heads, dim)
            return torch.randn(shape, generator=generator, device=configuration.device).to(dtype)

        c = configuration
        return cls(
            draw(c.heads_q, c.head_dim),
            draw(c.heads_kv, c.head_dim),
            draw(c.heads_kv, c.dim_v),
            draw(c.heads_q, c.dim_v),
        )


@dataclass
class Implementation:
    """`function(query, key, value) -> out` over leaves in its own layout; `to_packed` brings any of them to [T, H, D]."""

    name: str
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    to_packed: Callable[[Tensor], Tensor]
    to_own: Callable[[Tensor], Tensor]
    has_backward: bool = True

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.leaves)

    def forward_backward(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.function(*self.leaves).backward(self.dout)

    def backward(self) -> Callable[[], object]:
        """A call that runs the backward alone, over one forward."""
        out = self.function(*self.leaves)
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def build(name: str, configuration: Configuration, inputs: Inputs) -> Implementation:
    """The named implementation over the given inputs."""
    lengths = configuration.lengths
    gqa = {"enable_gqa": True} if configuration.heads_q != configuration.heads_kv else {}
    to_own, to_packed = _packed_to_batch, _batch_to_packed
    has_backward = True

    if name == "packattn":
        packing = packattn.Packing.from_lengths(lengths, device=configuration.device)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packattn.attention(q, k, v, packing)

        to_own = to_packed = _same
    elif name == "sdpa_loop":
        # split and cat, not slices: the backward of q[:, :, a:b] writes a gradient of the full size per document,
        # which makes the loop quadratic in the number of documents and would flatter everybody else.
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            documents = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*d, is_causal=True, **gqa) for d in documents], 2)

    elif name == "sdpa_dense":
        ids = _document_ids(configuration)
        mask = (ids[:, None] == ids[None]) & torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).tril()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **gqa)

    elif name == "sdpa_padded":
        # Documents padded at the end to the longest: under a causal mask no token sees the padding behind it.
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)

        def to_own(x: Tensor) -> Tensor:
            padded = x.new_zeros(len(lengths), x.shape[1], max(lengths), x.shape[2])
            for row, document in zip(padded, x.split(lengths), strict=True):
                row[:, : len(document)] = document.transpose(0, 1)
            return padded

        def to_packed(x: Tensor) -> Tensor:
            return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(x, lengths, strict=True)])

    elif name == "flex":
        ids = _document_ids(configuration)

        def visible(b: Tensor, h: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
            return (ids[q_row] == ids[k_row]) & (q_row >= k_row)

        tokens = configuration.tokens
        block_mask = create_block_mask(visible, None, None, tokens, tokens, device=configuration.device)
        compiled = _compiled_flex(
            configuration.tokens, configuration.head_dims, configuration.heads, configuration.dtype
        )
        has_backward = configuration.device != "cpu"  # where torch has no backward of FlexAttention

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=block_mask, **gqa)

    else:
        raise ValueError(f"no implementation is called {name!r}")

    leaves = tuple(to_own(x).requires_grad_(has_backward) for x in (inputs.query, inputs.key, inputs.value))
    return Implementation(name, leaves, to_own(inputs.dout), function, to_packed, to_own, has_backward)


def matrix_product(dtype: str) -> tuple[Callable[[], Tensor], float]:
    """(torch.mm of two square matrices, its flops): what a dense product reaches here, the limit for attention."""
    size = _mm_size(dtype)
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    return lambda: torch.mm(a, b), 2.0 * size**3


@cache
def _mm_size(dtype: str) -> int:
    """2048, or 512 where torch has no fast product for the dtype (bfloat16 without AVX-512: minutes at 2048).

    Asked of 512 itself: 256 x 256 may still run from the caches, ten times as fast.
    """
    a, b = (torch.randn(512, 512).to(getattr(torch, dtype)) for _ in range(2))
    torch.mm(a, b)
    start = time.perf_counter()
    torch.mm(a, b)
    slow = 2.0 * 512**3 / (time.perf_counter() - start) < 5e9
    return 512 if slow else 2048


@cache
def _compiled_flex(tokens: int, head_dims: str, heads: str, dtype: str) -> Callable[..., Tensor]:
    # A compilation of its own for each shape: one shared function would recompile with dynamic shapes.
    return torch.compile(flex_attention, dynamic=False)


def _document_ids(configuration: Configuration) -> Tensor:
    lengths = torch.tensor(configuration.lengths, device=configuration.device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _same(x: Tensor) -> Tensor:
    return x.clone()


def _packed_to_batch(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].contiguous()


def _batch_to_packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
