"""Functions with other libraries' signatures: change the import, keep the call.

    from packattn import flash_attn_varlen_func     # flash-attn
    from packattn import varlen_attn                # torch.nn.attention.varlen

What packattn cannot honour raises; nothing is dropped silently. The maximal lengths that these functions ask for are
accepted and not used: packattn needs none. Rows past the last offset are 0, with lse -inf and gradient 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401  (the ops must be registered)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash-attn's function of this name. The backward is deterministic always, and lse is differentiable.

    Args:
        q: [Tq, Hq, D]; float32 and float64 too, on any device.
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: [N + 1], int32 or int64. Documents are aligned at their last tokens.
        max_seqlen_q, max_seqlen_k: not used.
        window_size: (left, right), a negative number or None for no limit; (0, 0) is the token itself.
        deterministic: accepted, it is deterministic either way.
        s_aux: [Hq] attention sinks (not in flash-attn 2).

    Returns:
        [Tq, Hq, Dv]; with ``return_attn_probs`` also lse, float32 [Hq, Tq], and None (no probabilities are formed).

    Raises:
        ValueError: dropout_p, alibi_slopes or block_table are given, or a tensor does not fit.
    """
    _refuse("flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = torch.ops.packattn.attention(
        q,
        k,
        v,
        cu_seqlens_q,
        None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k,
        causal,
        *_window(window_size),
        softmax_scale,
        float(softcap),
        s_aux,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash-attn's function of this name, for batches that are not packed: q [B, Sq, Hq, D], k, v [B, Sk, Hkv, D].

    Other arguments and errors as in :func:`flash_attn_varlen_func`.

    Returns:
        [B, Sq, Hq, Dv]; with ``return_attn_probs`` also lse, float32 [B, Hq, Sq], and None.
    """
    _refuse("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"flash_attn_func: {name} must be 4-D [B, S, heads, head_dim], got {checks.describe(x)}")
    batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"flash_attn_func: k and v must be [{batch}, {sk}, ...] like q and k, got k {list(k.shape)} and v {list(v.shape)}"
        )
    number = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out, lse = torch.ops.packattn.attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        number * sq,
        number * sk,
        causal,
        *_window(window_size),
        softmax_scale,
        float(softcap),
        s_aux,
    )
    out = out.unflatten(0, (batch, sq))
    return (out, lse.unflatten(1, (batch, sq)).transpose(0, 1), None) if return_attn_probs else out


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.varlen.varlen_attn``, on any device, in float32 too, with a differentiable lse.

    Args:
        query: [Tq, Hq, D].
        key: [Tk, Hkv, D].
        value: [Tk, Hkv, Dv].
        cu_seq_q, cu_seq_k: [N + 1], int32 or int64. Documents are aligned at their last tokens.
        max_q, max_k: not used.
        return_aux: ``torch.nn.attention.varlen.AuxRequest`` (anything with ``lse``).
        window_size: (left, right), -1 for no limit; (-1, 0) is causal.
        enable_gqa: must be True where Hq != Hkv, as torch wants it.
        num_splits: accepted; nothing is split, results do not depend on the rest of the batch.

    Returns:
        [Tq, Hq, Dv]; with ``return_aux.lse`` also lse, float32 [Hq, Tq].

    Raises:
        ValueError: seqused_k or block_table are given, cu_seq_k is missing, or a tensor does not fit.
    """
    _refuse("varlen_attn", seqused_k=seqused_k, block_table=block_table)
    if cu_seq_k is None:
        raise ValueError(
            "varlen_attn: cu_seq_k must be offsets [N + 1], got None (torch needs none for paged keys only)"
        )
    if not enable_gqa and query.dim() == key.dim() == 3 and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"varlen_attn: query and key must have the same number of heads unless enable_gqa=True, got "
            f"{query.shape[1]} and {key.shape[1]}"
        )
    out, lse = torch.ops.packattn.attention(
        query, key, value, cu_seq_q, None if cu_seq_k is cu_seq_q else cu_seq_k, False, *_window(window_size), scale
    )
    return (out, lse) if return_aux is not None and return_aux.lse else out


_WHY = {
    "dropout_p": "dropout inside attention is not implemented; set it to 0",
    "alibi_slopes": "a bias on the scores is not implemented",
    "block_table": "keys in pages (serving) are not implemented",
    "seqused_k": "pass offsets in which every document has the length that is in use",
}


def _refuse(function: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and (name != "dropout_p" or value != 0):
            raise ValueError(f"{function}: {name} cannot be honoured: {_WHY[name]}")


def _window(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), -1 for no limit, got {window_size!r}")
    left, right = (-1 if n is None or n < 0 else int(n) for n in window_size)
    return left, right
