"""prepare: a forward pre-hook that gives a transformers model every name of its documents, from the one that was passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from .. import checks
from ..packing import Packing
from . import _hf_ranges
from ._hf_ranges import Documents

_COMPILED_IDS = (
    "packattn.prepare: an attention_mask that numbers the documents cannot be told from padding while compiling; pass "
    "position_ids or seq_idx with it, or call prepare on what torch.compile returns"
)


def prepare(model: torch.nn.Module) -> Callable[[], None]:
    """Makes every way of naming documents work for this model, by a forward pre-hook that fills in the others.

    Needed for models that do not hand ``position_ids`` on to their layers (encoders such as BERT and ModernBERT, Llama
    4 with a cache), for a 2-D attention_mask that numbers the documents (1, 1, 2, 2, 0: 0 is padding) without positions,
    and to make positions restart where only ``cu_seq_lens_q``, ``seq_idx`` or ``packing`` are passed.

    The hook adds ``segment_ids`` (from a mask with ids, or from positions) and ``position_ids`` (from the documents)
    where they are missing. To hybrid models it also passes ``seq_idx`` and ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by
    which their linear attention, convolution and state space layers keep documents apart, or say what they need to do
    so. Calls with a cache are left alone. It looks at the values of an integer mask (and, for hybrid models, counts the
    documents), so it waits for the device once per call. Positions begin where the model's own do (RoBERTa and its kin
    count from ``pad_token_id + 1``). Wrappers (PEFT, DistributedDataParallel, torch.compile) may be passed as well.

    Padding (0 in a 2-D attention_mask) may lie anywhere, in the middle of a document too. It never divides one: the token
    after it belongs to the document before it if its id is the same, or if its position goes on from the last token's or
    from the padding's; and positions that the hook adds count tokens, not padding.

    Returns:
        a function that takes the hook off again.

    Raises:
        TypeError: the model's forward does not take keyword arguments for its layers.
        ValueError: an encoder-decoder model: its cross-attention would have to know the documents of both sides.
    """
    inner = _unwrapped(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"prepare: {type(inner).__name__} is an encoder-decoder model; packed rows cannot be kept apart in its "
            "cross-attention, which is told about one of its two sides only"
        )
    parameters = inspect.signature(inner.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise TypeError(
            f"prepare: {type(inner).__name__}.forward must pass keyword arguments (**kwargs) on to its layers, it takes "
            + ", ".join(parameters)
        )
    takes_positions = "position_ids" in parameters
    hybrid, first = _is_hybrid(inner), first_position(inner)
    # What the arguments are that come without a name; a wrapper may have its own order, or none.
    names = _positional(inspect.signature(model.forward).parameters) or _positional(parameters)

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}
        if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            return None
        tokens = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if x is not None), None)
        if not isinstance(tokens, Tensor):
            return None
        size = torch.Size(tokens.shape[:2])
        named, given = Documents.of(kwargs), kwargs.get("attention_mask")
        mask = given if isinstance(given, Tensor) and given.shape == size else None
        real = None if mask is None else mask != 0
        ids, step = _ids(named, given, size)
        if ids is None:
            return args, kwargs
        everything = torch.ones(size, dtype=torch.bool, device=ids.device)
        begin, positions = _hf_ranges.goes_on(ids, step, everything if real is None else real)
        if named.name() == "attention_mask":
            assert mask is not None and real is not None
            # A mask of ones would say that every row is one document.
            kwargs = {**kwargs, "attention_mask": None if bool(real.all()) else real.to(mask.dtype)}
        if named.name() in ("attention_mask", "position_ids"):
            kwargs = {**kwargs, "segment_ids": begin}
        if takes_positions and named.position_ids is None:
            kwargs = {**kwargs, "position_ids": positions + first}
        if hybrid:
            known = named.packing if named.packing is not None else Packing.from_segment_ids(begin)
            if known.num_documents > 1:
                cu, longest = known.cu_seqlens, int(known.lengths.max())
                kwargs = {"seq_idx": known.segment_ids.view(size), "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, **kwargs}
                kwargs = {"max_length_q": longest, "max_length_k": longest, **kwargs}
        return args, kwargs

    return model.register_forward_pre_hook(before, with_kwargs=True).remove


def _ids(named: Documents, mask: Any, size: torch.Size) -> tuple[Tensor | None, int]:
    """What tells the documents of a call apart, [B, S], and by how much it grows from token to token inside one."""
    total = size.numel()
    if named.packing is not None:
        if named.packing.total != total:
            raise ValueError(
                f"prepare: packing must have the {total} tokens of input_ids {list(size)}, got {named.packing!r}"
            )
        return named.packing.segment_ids.view(size), 0
    if named.cu_q is not None:
        return Packing.from_cu_seqlens(named.cu_q, total=total).segment_ids.view(size), 0
    if named.segment_ids is not None:
        return _like(named.segment_ids, "segment ids", size), 0
    numbered = isinstance(mask, Tensor) and mask.shape == size and mask.dtype in (torch.int32, torch.int64)
    if numbered and mask.numel() and checks.has_values(mask) and int(mask.max()) > 1:
        return mask, 0
    if named.position_ids is not None and named.position_ids.dim() < 3:
        return _like(named.position_ids, "position_ids", size), 1
    if numbered and not checks.has_values(mask):
        torch._assert_async(mask.max() <= 1, _COMPILED_IDS)
    return None, 0


def _like(ids: Tensor, name: str, size: torch.Size) -> Tensor:
    if ids.is_floating_point():
        raise ValueError(f"prepare: {name} must be integers, got {checks.describe(ids)}")
    if ids.dim() not in (1, 2) or ids.shape[-1] != size[1] or (ids.dim() == 2 and ids.shape[0] not in (1, size[0])):
        raise ValueError(
            f"prepare: {name} must be [{size[0]} or 1, {size[1]}] like input_ids {list(size)}, got {checks.describe(ids)}"
        )
    return ids.expand(size)


def _unwrapped(model: Any) -> Any:
    """The model inside PEFT, DistributedDataParallel and torch.compile."""
    while not isinstance(model, transformers.PreTrainedModel):
        if callable(getattr(model, "get_base_model", None)):  # PEFT
            inside = model.get_base_model()
        else:
            inside = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inside, torch.nn.Module) or inside is model:
            break
        model = inside
    return model


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def first_position(model: torch.nn.Module) -> int:
    """The position of a document's first token: 0, or ``padding_idx + 1`` where positions up to that are padding's
    (RoBERTa, XLM-R, ESM)."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def _is_hybrid(model: Any) -> bool:
    """Whether some layers are no softmax attention, as far as the config says."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return any(kind not in ("full_attention", "sliding_attention", "chunked_attention", "attention") for kind in kinds)
