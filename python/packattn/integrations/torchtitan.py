"""torchtitan: an inner attention over the packed token axis.

    from packattn.integrations import torchtitan as titan

    inner_attention = titan.PackattnAttention.Config()           # where get_attention_config returns VarlenAttention.Config
    masks = titan.get_attention_masks(positions)                 # what Decoder.get_attention_masks returns

torchtitan has no batch dimension; ``positions`` [T] restart in every document. Nothing of torchtitan is imported: the
contract is a module whose ``Config().build()`` makes it and whose forward has the arguments below. float32 stays float32
(torch's varlen_attn would go through bfloat16), CPU works, and no maximal length is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dropins import _window
from ..packing import Packing


def get_attention_masks(positions: Tensor, rule: str = "step", max_segments: int | None = None) -> Packing:
    """Where the documents of ``positions`` ([T], or [B, S] flattened) lie; see :meth:`Packing.from_position_ids`.

    Collators of torchtitan count padding from 0 as a document of its own, or fill it with 0 (every token its own).
    """
    return Packing.from_position_ids(positions, rule, max_segments)


class PackattnAttention(torch.nn.Module):
    """Takes the place of torchtitan's VarlenAttention."""

    @dataclass(kw_only=True)
    class Config:
        """window_size: (left, right), -1 for no limit; (-1, 0) is causal, (W, 0) causal over W tokens back."""

        window_size: tuple[int, int] = (-1, 0)
        softcap: float = 0.0

        def build(self) -> PackattnAttention:
            return PackattnAttention(self)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        config = self.Config() if config is None else config
        self.window_size = _window(config.window_size)
        self.softcap = config.softcap

    def forward(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, N, H], k and v [T, Nkv, H]; [B, L, N, H] is flattened and given back so.

        Args:
            attention_masks: a :class:`packattn.Packing`, or torchtitan's VarlenMetadata (``cu_seq_q``, ``cu_seq_k``).
            out_transform: called with out and lse (float32 [N, T]); its result is returned.

        Raises:
            TypeError: masks of another kind (a BlockMask, for instance).
        """
        shape = q_TNH.shape
        q, k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q_TNH, k_TNH, v_TNH))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(attention_masks, Packing):
            key_begin, key_end = attention_masks.key_ranges(causal=False, window_size=self.window_size)
            out, lse = torch.ops.packattn.attention_forward(q, k, v, key_begin, key_end, sinks, scale, self.softcap)
        else:
            cu_q, cu_k = (getattr(attention_masks, name, None) for name in ("cu_seq_q", "cu_seq_k"))
            if cu_q is None or cu_k is None:
                raise TypeError(
                    "PackattnAttention: attention_masks must be a packattn.Packing or have cu_seq_q and cu_seq_k, got "
                    + type(attention_masks).__name__
                )
            out, lse = torch.ops.packattn.attention(
                q, k, v, cu_q, cu_k, False, *self.window_size, scale, self.softcap, sinks
            )
        if out_transform is not None:
            return out_transform(out, lse)
        result: Tensor = out.view(*shape[:-1], out.shape[-1])
        return result
