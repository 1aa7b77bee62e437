"""OLMo-core: an attention backend with intra-document masking for every device.

    from packattn.integrations import olmo
    olmo.use_packattn(model)              # replaces the backend of every attention layer of a built model

OLMo-core's SDPA backend refuses intra-document masking and its flash backends need a GPU; this one takes ``cu_doc_lens``
anywhere. Batches carry ``doc_lens`` [B, max_docs] padded with zeros, of which OLMo-core makes ``cu_doc_lens``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dropins import _window


def make_backend(base: type[Any] | None = None) -> type[Any]:
    """The backend as a subclass of OLMo-core's ``AttentionBackend`` (or of ``base``, which has its contract).

    Raises:
        ImportError: olmo_core is not installed and no base is given.
    """
    if base is None:
        from olmo_core.nn.attention.backend import AttentionBackend

        base = AttentionBackend

    class PackattnBackend(base):  # type: ignore[misc, valid-type]
        """``window_size`` (left, right) applies inside each document, on top of causality."""

        @classmethod
        def assert_supported(cls) -> None:
            pass

        @classmethod
        def assert_supports_swa(cls) -> None:
            pass

        @classmethod
        def assert_supports_ring_cp(cls) -> None:
            raise RuntimeError("packattn: the OLMo-core backend does not support ring context parallelism")

        @classmethod
        def assert_supports_ulysses_cp(cls) -> None:
            raise RuntimeError("packattn: the OLMo-core backend does not support Ulysses context parallelism")

        @classmethod
        def assert_supports_packed_qkv(cls) -> None:
            pass

        @classmethod
        def assert_supports_kv_cache(cls) -> None:
            raise RuntimeError("packattn: the OLMo-core backend does not support a KV cache")

        def forward(
            self,
            qkv: Tensor | tuple[Tensor, Tensor, Tensor],
            cu_doc_lens: Tensor | None = None,
            cu_doc_lens_q: Tensor | None = None,
            cu_doc_lens_k: Tensor | None = None,
            max_doc_len: int | None = None,
            max_doc_len_q: int | None = None,
            max_doc_len_k: int | None = None,
            local_k_slice: slice | None = None,
            kv_cache_manager: Any = None,
            or_mask: Tensor | None = None,
            and_mask: Tensor | None = None,
        ) -> Tensor:
            """q [B, T, Hq, D], k and v [B, T, Hkv, D], or packed [B, T, 3, H, D]; returns [B, T, Hq, D]. Offsets run over
            the flattened batch; without any, every row of the batch is one document.

            Raises:
                ValueError: what cannot be honoured: a KV cache, key slices, extra masks, dropout.
            """
            for name, given in (
                ("local_k_slice", local_k_slice),
                ("kv_cache_manager", kv_cache_manager),
                ("or_mask", or_mask),
                ("and_mask", and_mask),
            ):
                if given is not None:
                    raise ValueError(f"packattn: {name} cannot be honoured by the OLMo-core backend")
            if self.dropout_p and self.training:
                raise ValueError(f"packattn: attention dropout {self.dropout_p} cannot be honoured; set it to 0")
            q, k, v = qkv.unbind(2) if isinstance(qkv, Tensor) else qkv
            batch, size = q.shape[:2]
            cu_q = cu_doc_lens if cu_doc_lens_q is None else cu_doc_lens_q
            cu_k = cu_doc_lens if cu_doc_lens_k is None else cu_doc_lens_k
            if (cu_q is None) != (cu_k is None):
                raise ValueError("packattn: cu_doc_lens_q and cu_doc_lens_k must come together")
            if cu_q is None:
                number = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
                cu_q, cu_k = number * size, number * k.shape[1]
            out, _ = torch.ops.packattn.attention(
                *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, True, *_window(self.window_size), self.scale
            )
            result: Tensor = out.unflatten(0, (batch, size))
            return result

    return PackattnBackend


def use_packattn(model: torch.nn.Module, base: type[Any] | None = None) -> int:
    """Replaces every attention backend in a built model by packattn's, with the same settings; returns how many.

    Raises:
        ValueError: the model has none, or one that context parallelism is applied to.
    """
    backend = make_backend(base)
    kind: Any = backend.__mro__[1]
    count = 0
    for name, parent in list(model.named_modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for child, old in children:
            if not isinstance(old, kind) or isinstance(old, backend):
                continue
            if getattr(old, "cp_enabled", False):
                raise ValueError(
                    f"use_packattn: context parallelism is applied to {name}.{child}, it cannot be replaced"
                )
            new = backend(
                head_dim=old.head_dim,
                n_heads=old.n_heads,
                n_kv_heads=old.n_kv_heads,
                scale=old.scale,
                dropout_p=old.dropout_p,
                window_size=old.window_size,
                cache=old.cache,
            )
            setattr(parent, child, new.train(old.training))
            count += 1
    if not count:
        raise ValueError(f"use_packattn: {type(model).__name__} holds no module of type {kind.__name__}")
    return count
