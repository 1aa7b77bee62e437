"""Megatron-LM: a core attention for THD batches that needs no Transformer Engine.

    from packattn.integrations.megatron import PackattnCoreAttention
    layer_spec.submodules.self_attention.submodules.core_attention = PackattnCoreAttention

Megatron's own DotProductAttention refuses packed sequences. Nothing of Megatron is imported: the contract is the
constructor and forward below. Context parallelism is not supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ._hf_ranges import ranges_from_dense


class PackattnCoreAttention(torch.nn.Module):
    """The constructor's arguments are those of Megatron's DotProductAttention; what is read of ``config`` is
    ``attention_dropout``, ``context_parallel_size``, ``window_size``, ``window_attn_skip_freq``, ``softmax_type``,
    ``num_attention_heads``, ``params_dtype``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if getattr(config, "context_parallel_size", 1) != 1:
            raise ValueError(
                f"PackattnCoreAttention: context_parallel_size must be 1, got {config.context_parallel_size}"
            )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = getattr(config, "attention_dropout", 0.0) if attention_dropout is None else attention_dropout
        window = getattr(config, "window_size", None)
        windowed = window is not None and _is_windowed(layer_number, getattr(config, "window_attn_skip_freq", None))
        self.window_size: tuple[int, int] = (int(window[0]), int(window[1])) if window and windowed else (-1, -1)
        kind = getattr(config, "softmax_type", "vanilla")
        heads = config.num_attention_heads
        if pg_collection is not None:
            heads //= pg_collection.tp.size()
        if kind not in ("vanilla", "off-by-one", "learnable"):
            raise ValueError(
                f'PackattnCoreAttention: softmax_type must be "vanilla", "off-by-one" or "learnable", got {kind!r}'
            )
        offset = None if kind == "vanilla" else torch.zeros(heads, dtype=getattr(config, "params_dtype", None))
        if kind == "learnable":
            assert offset is not None
            self.softmax_offset: Tensor | None = torch.nn.Parameter(offset)
            if getattr(config, "perform_initialization", False):
                config.init_method(self.softmax_offset)
        else:
            self.register_buffer("softmax_offset", offset, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [t, np, hn] with ``packed_seq_params`` (THD) or [s, b, np, hn] without; returns [t, np * hn] or
        [s, b, np * hn]. An attention_mask [b or 1, 1, s, s] (True hides) is followed where the type is "causal":
        Megatron's ``reset_attention_mask`` puts documents into it. It is read in every layer; do without it where the
        documents need not be kept apart (``create_attention_mask_in_dataloader=False``). With ``packed_seq_params`` it is
        not looked at.

        Raises:
            ValueError: attention_bias, dropout in training, an attention_mask of another type or one in which a token
                sees anything but one run of keys, or offsets that do not fit.
        """
        if attention_bias is not None:
            raise ValueError("PackattnCoreAttention: attention_bias cannot be honoured")
        if self.dropout and self.training:
            raise ValueError(
                f"PackattnCoreAttention: attention_dropout {self.dropout} cannot be honoured; set it to 0 in the config"
            )
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        name = getattr(kind, "name", str(kind))
        if name not in ("causal", "padding_causal", "no_mask", "padding"):
            raise ValueError(
                'PackattnCoreAttention: attn_mask_type must be "causal", "padding_causal", "padding" or "no_mask", '
                f"got {name!r}"
            )
        causal = "causal" in name
        if packed_seq_params is None:
            if attention_mask is not None and name != "causal":
                raise ValueError(
                    f"PackattnCoreAttention: attention_mask ({checks.describe(attention_mask)}) with attn_mask_type {name} "
                    "cannot be honoured; pass packed_seq_params"
                )
            size, batch = query.shape[:2]
            ends = torch.arange(1, batch + 1, dtype=torch.int32, device=query.device)
            documents = [(ends - 1) * size, ends * size, (ends - 1) * key.shape[0], ends * key.shape[0]]
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            visible = None if attention_mask is None else _visible(attention_mask, batch, size, key.shape[0])
            out = self._attend(q, k, v, documents, causal, visible)
            result: Tensor = out.unflatten(0, (batch, size)).transpose(0, 1).flatten(2)
            return result
        documents = [*_documents(packed_seq_params, "q"), *_documents(packed_seq_params, "kv")]
        return self._attend(query, key, value, documents, causal).flatten(1)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: list[Tensor],
        causal: bool,
        visible: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """visible: int32 [t] each, first and one past the last key that a token sees, where a mask says more than the
        documents do."""
        begin, end, diagonal, _ = torch.ops.packattn.document_ranges(*documents, q.shape[0])
        if visible is not None:
            begin, end = torch.maximum(begin, visible[0]), torch.minimum(end, visible[1])
        key_begin, key_end = torch.ops.packattn.key_ranges(begin, end, diagonal, None, causal, *self.window_size, 0)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        out: Tensor = torch.ops.packattn.attention_forward(
            q, k, v, key_begin, key_end, self.softmax_offset, float(scale), 0.0
        )[0]
        return out


def _visible(mask: Tensor, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """What a mask [b or 1, 1, queries, keys] (True hides) leaves, as ranges over the flattened batch."""
    if (
        mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1:] != (1, queries, keys)
    ):
        raise ValueError(
            f"PackattnCoreAttention: attention_mask must be bool [{batch} or 1, 1, {queries}, {keys}], got "
            + checks.describe(mask)
        )
    shown = ~mask.expand(batch, 1, queries, keys)
    lo, hi, real = ranges_from_dense(shown, "PackattnCoreAttention")
    if checks.has_values(real) and not bool(real.all()):
        raise ValueError(
            "PackattnCoreAttention: attention_mask hides keys from every token, itself included; pass packed_seq_params "
            "for batches with padding"
        )
    base = torch.arange(batch, device=mask.device)[:, None] * keys
    return (lo + base).flatten().int(), (hi + base).flatten().int()


def _documents(params: Any, side: str) -> tuple[Tensor, Tensor]:
    """First and one past the last token of every document. With ``cu_seqlens_*_padded`` the documents lie at the padded
    offsets, and what follows them up to the next belongs to none."""
    if getattr(params, "qkv_format", "thd") != "thd":
        raise ValueError(f'PackattnCoreAttention: qkv_format must be "thd", got {params.qkv_format!r}')
    cu = getattr(params, f"cu_seqlens_{side}", None)
    if cu is None:
        raise ValueError(f"PackattnCoreAttention: packed_seq_params must have cu_seqlens_{side}, got None")
    checks.cu_seqlens("PackattnCoreAttention", cu, None, f"cu_seqlens_{side}")
    padded = getattr(params, f"cu_seqlens_{side}_padded", None)
    if padded is None:
        return cu[:-1], cu[1:]
    checks.cu_seqlens("PackattnCoreAttention", padded, None, f"cu_seqlens_{side}_padded")
    if padded.shape != cu.shape:
        raise ValueError(
            f"PackattnCoreAttention: cu_seqlens_{side}_padded must be as long as cu_seqlens_{side} ({cu.shape[0]}), got "
            + checks.describe(padded)
        )
    return padded[:-1], padded[:-1] + (cu[1:] - cu[:-1])


def _is_windowed(layer_number: int, skip: int | list[int] | None) -> bool:
    """As Megatron counts (layers from 1): every ``skip``-th layer sees everything; a list says it layer by layer."""
    if skip is None:
        return True
    if isinstance(skip, int):
        return layer_number % skip != 0
    return bool(skip[layer_number - 1])
