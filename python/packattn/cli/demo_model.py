"""A small Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Attention is an argument of the forward call, so that one set of weights runs with every kind of attention. Tokens come
in any leading shape: [T] for packed rows laid end to end, [B, S] for a batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packattn

# q [..., Hq, D], k [..., Hkv, D], v [..., Hkv, D] -> [..., Hq, D], with the leading shape of the tokens
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    vocabulary: int = 258
    width: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512
    max_positions: int = 4096
    rope_base: float = 10000.0


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.qkv = nn.Linear(config.width, q_width + 2 * kv_width, bias=False)
        self.out = nn.Linear(q_width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        c = self.config
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=-2)
        out = attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.out(out.flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return x


class Decoder(nn.Module):
    """Token and position ids, int64 [...], and an attention -> logits [..., vocabulary]."""

    cos: Tensor  # [max_positions, head_dim / 2]
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        frequency = config.rope_base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(config.max_positions), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # smaller where a layer writes into the residual stream, as in GPT-2
                scale = (2 * config.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        for block in self.blocks:
            x = block(x, cos, sin, attention)
        return F.linear(self.norm(x), self.embedding.weight)


def packed(packing: packattn.Packing) -> Attention:
    """packattn: tokens [T], every document sees itself only."""
    return lambda q, k, v: packattn.attention(q, k, v, packing)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention with the plain causal mask: it knows nothing of documents."""
    return _sdpa(q, k, v, None)


def masked(mask: Tensor) -> Attention:
    """PyTorch's attention with a mask, bool [..., S, S], True where a query (row) sees a key (column)."""
    return lambda q, k, v: _sdpa(q, k, v, mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))  # [..., H, S, D]
    single = q.dim() == 3
    if single:  # the fused CPU kernel serves only tensors with a batch dimension
        q, k, v = q[None], k[None], v[None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return (out[0] if single else out).transpose(-3, -2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on halves (GPT-NeoX order, as Llama checkpoints of transformers have it); cos, sin [..., 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
