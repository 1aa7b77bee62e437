"""Hugging Face transformers: ``attn_implementation="packattn"``.

    import packattn.integrations.transformers as hf
    hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="packattn")

A packed row is then kept apart in every way of calling the model that says where its documents lie: the layers look for
the boundaries, in this order, in the keyword arguments ``packing`` (a :class:`packattn.Packing`), ``cu_seq_lens_q`` and
``cu_seq_lens_k``, ``seq_idx`` or ``segment_ids``, ``position_ids`` (any batch size; a document begins at every row start
and where a position is not the one before plus 1), and in the padding mask. Training, ``generate()`` (prefill and cached
decoding, static caches too) and encoders work, under torch.compile, gradient checkpointing, autocast and PEFT.

A 2-D attention_mask that numbers the documents (1, 1, 2, 2, 0) is turned into ones and zeros by transformers before any
attention function sees it. Pass position_ids with it, as LLaMA-Factory and axolotl do, or call :func:`prepare`.

Only the public registries of transformers (``AttentionInterface``, ``AttentionMaskInterface``) are used.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import _library, checks
from . import _hf_ranges
from ._hf_prepare import first_position, prepare
from ._hf_ranges import Documents, Ranges, Shape

__all__ = ["attention", "first_position", "mask", "prepare", "register", "unregister"]

_replaced: dict[str, tuple[Any, Any]] = {}


# ---- registration ----------------------------------------------------------------------------------------------


def register(name: str = "packattn", as_name: str | None = None) -> None:
    """Makes ``attn_implementation=name`` known to transformers, for every model of this process.

    Args:
        name: how models ask for it.
        as_name: also take the place of this implementation ("sdpa", for instance), for training stacks that accept
            a fixed set of names only. Every model that uses that name then runs packattn, until :func:`unregister`.

    Raises:
        ValueError: a name that transformers treats specially ("flash", "sdpa", "flex_attention" or "/" in it);
            ``as_name`` may be one, except "eager", which is not registered but part of every model.
        ImportError: a transformers without mask registration (older than 5.20).
    """
    _check_version()
    special = [part for part in ("flash", "sdpa", "flex_attention", "eager", "paged", "/", "|") if part in name]
    if not name or special:
        raise ValueError(
            f"register: name must not contain {special[0]!r}, transformers treats such names specially, got {name!r}; "
            "use as_name to take the place of another implementation"
            if special
            else "register: name must not be empty"
        )
    if as_name == "eager":  # nothing could be given back: each model brings its own function
        raise ValueError('register: as_name must be a registered implementation ("sdpa", for instance), got "eager"')
    for key in (name,) if as_name is None else (name, as_name):
        if key not in _replaced:
            functions, masks = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
            _replaced[key] = (functions.get(key), masks.get(key))
        AttentionInterface.register(key, attention)
        AttentionMaskInterface.register(key, mask)


def unregister(name: str) -> None:
    """Gives a name that packattn took with ``register(as_name=name)`` back to the implementation it had before.

    Raises:
        ValueError: packattn did not replace anything of that name.
    """
    function, mask_function = _replaced.get(name, (None, None))
    if function is None:
        raise ValueError(
            f"unregister: name must be one that packattn replaced with register(as_name=...), got {name!r}"
        )
    AttentionInterface.register(name, function)
    if mask_function is not None:
        AttentionMaskInterface.register(name, mask_function)
    del _replaced[name]


def _check_version() -> None:
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if release < (5, 20):
        raise ImportError(f"packattn needs transformers >= 5.20, found {transformers.__version__}")


# ---- the mask builder ------------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask builder for ``AttentionMaskInterface``: None where the layers know everything, or a range mask.

    It is called once per forward and kind of layer. Documents are not its business: it sees neither cu_seq_lens nor
    seq_idx, and transformers hides positions from it as soon as there is a cache or a mask.

    Raises:
        ValueError: the model computes attention on its own (BLOOM), and would take None for "every key is visible".
    """
    kind: Any = type(config)
    if config is not None and not _asks_the_registry(kind):
        raise ValueError(
            f"packattn: models of {kind.__name__} compute attention on their own and would not call packattn; use "
            'attn_implementation="eager" for this model, without packed rows'
        )
    bidirectional = "allow_is_bidirectional_skip" in kwargs
    offset = q_offset - kv_offset
    # Only a function with something on top of plain causality can hold documents or blocks.
    plain = bidirectional or mask_function is causal_mask_function

    def neighbour(distance: int) -> Tensor:
        """bool [B, Q - 1]: whether token q + 1 sees token q (-1), or token q token q + 1 (1)."""
        q = (torch.arange(q_length - 1, device=device) + q_offset)[None]
        b = torch.arange(batch_size, device=device)[:, None]
        one, other = (q + 1, q) if distance < 0 else (q, q + 1)
        visible: Tensor = mask_function(b, torch.zeros_like(b), one, other).expand(batch_size, q_length - 1)
        return visible

    custom = use_vmap
    if not custom and not plain and not allow_is_causal_skip and q_length > 1:
        custom = _looks_ahead(neighbour(1))
    if custom:
        made: Any = sdpa_mask  # its offset may be a tensor (static caches), whatever its annotation says
        dense = made(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        lo, hi, real = _hf_ranges.ranges_from_dense(dense)
        return _hf_ranges.pack_range_mask(lo, hi, torch.zeros_like(lo), real, offset, flags=_hf_ranges.EXACT)

    local = local_size is not None and kv_length + kv_offset > local_size
    aligned = not isinstance(q_offset, Tensor) and (bidirectional or offset == kv_length - q_length)
    packed = not plain and not allow_is_causal_skip and attention_mask is None and q_length > 1
    if attention_mask is None and aligned and not local and not packed:
        return None
    row = torch.arange(q_length, device=device).expand(batch_size, q_length)
    diagonal = row + offset
    lo, hi = torch.zeros_like(row), torch.full_like(row, kv_length)
    real = _padding(attention_mask, batch_size, kv_length, kv_offset, device)
    if not bidirectional:
        hi = diagonal + 1
    chunk, flags = 0, 0 if attention_mask is None else _hf_ranges.GIVEN
    if local_size is not None and local:
        if _is_chunk(config, local_size):
            chunk = local_size
            if not packed:  # counted from the first token of the row, which a sliding cache may have dropped
                padding = 0 if attention_mask is None else (attention_mask.cumsum(1) == 0).sum(1, keepdim=True)
                place = row + q_offset - padding
                lo = place - place.remainder(chunk) + padding - kv_offset
        elif bidirectional:  # encoders count the neighbours on either side
            flags |= _hf_ranges.WINDOW
            lo, hi = diagonal - local_size, diagonal + local_size + 1
        else:
            lo = diagonal - (local_size - 1)
    if attention_mask is not None and not bidirectional:
        at = diagonal.clamp(0, kv_length - 1)
        hi = torch.where(real.gather(1, at), hi, 0)  # padding sees nothing
    lo, hi = lo.clamp(0, kv_length), hi.clamp(0, kv_length)
    begin = torch.zeros_like(row)
    if packed and (local_size is None or local_size > 1):
        # transformers saw positions restart. Not every model hands them on to its layers (Llama 4 does not).
        starts = torch.nn.functional.pad(~neighbour(-1), (1, 0))
        begin = torch.where(starts, diagonal, 0).cummax(1).values
    return _hf_ranges.pack_range_mask(lo, torch.maximum(lo, hi), begin, real, offset, chunk, flags)


@torch.compiler.assume_constant_result
def _asks_the_registry(config: type) -> bool:
    """Whether the models of a config look their attention function up. transformers lets a model be built with any
    registered name, also one that never does so. Judged by the source of its module; True where there is none."""
    return _source_asks_the_registry(config)


@functools.cache
def _source_asks_the_registry(config: type) -> bool:
    if config not in transformers.MODEL_MAPPING:
        return True
    found = transformers.MODEL_MAPPING[config]
    model = found[0] if isinstance(found, (tuple, list)) else found
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return True
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is None or "ALL_ATTENTION_FUNCTIONS" in source


def _is_chunk(config: Any, local_size: int) -> bool:
    chunk, window = (getattr(config, key, None) for key in ("attention_chunk_size", "sliding_window"))
    if chunk == local_size == window:
        raise ValueError(
            f"packattn: the config has attention_chunk_size = sliding_window = {local_size}, so that it cannot be told "
            "which of the two a layer means"
        )
    return chunk == local_size


def _looks_ahead(next_visible: Tensor) -> bool:
    """Whether a mask function that should be causal lets a query see the next key: blocks of image tokens do. Packed
    positions, windows and chunks do not, and those the layers know on their own."""
    ahead = next_visible.any()
    if not checks.has_values(ahead):
        torch._assert_async(~ahead, "packattn: this mask (blocks of tokens that see each other) cannot be compiled")
        return False
    return bool(ahead)


def _padding(
    attention_mask: Tensor | None, batch: int, keys: int, kv_offset: int, device: torch.device | str
) -> Tensor:
    """bool [B, K]: which keys are tokens. The mask may be longer than the keys (sliding cache) or shorter (static)."""
    if attention_mask is None:
        return torch.ones(batch, keys, dtype=torch.bool, device=device)
    if attention_mask.dim() != 2:
        raise ValueError(
            f"packattn: attention_mask must be 2-D [{batch}, {keys}] or 4-D, got {checks.describe(attention_mask)}"
        )
    real = (attention_mask != 0)[:, kv_offset : kv_offset + keys].expand(batch, -1)
    return torch.nn.functional.pad(real, (0, keys - real.shape[1]))


# ---- the attention function ------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function for ``AttentionInterface``.

    Args:
        module: the attention layer; its ``is_causal`` holds where the argument is None.
        query: [B, Hq, Q, D]. key: [B, Hkv, K, D]. value: [B, Hkv, K, Dv]. Hq is a multiple of Hkv.
        attention_mask: what :func:`mask` made, None, a padding mask [B, K], or a 4-D mask of the caller's whose rows
            each see one run of keys.
        sliding_window: W: a token sees itself and W - 1 before it (and W - 1 after it, if not causal).
        s_aux: [Hq] attention sinks.

    Returns:
        [B, Q, Hq, Dv] and None (there are no attention weights).

    Raises:
        ValueError: what cannot be honoured: position_bias, dropout > 0, output_attentions, head masks, a choice of keys
            (sparse attention), sinks per token, boundaries that do not fit the queries, and documents in cross-attention:
            a model tells all of its layers about the documents of one side only.
    """
    _refuse(module, dropout, position_bias, kwargs)
    documents = Documents.of(kwargs)
    across = _meets_another_sequence(module)
    dense = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.dtype != torch.int32
    if across and not (across == "is" and dense):  # a 4-D mask of the caller's says which keys are seen
        _refuse_documents(module, documents)
    if across == "is":
        documents = Documents()
    batch, heads, queries, _ = query.shape
    if key.shape[0] != batch:
        raise ValueError(f"packattn: query and key must have the same batch size, got {batch} and {key.shape[0]}")
    keys = key.shape[2]
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    window = sliding_window - 1 if sliding_window else -1  # configs say None or 0 for no window
    shape = Shape(batch, queries, keys, causal, window)
    ranges = _ranges(module, shape, attention_mask, documents, query.device, bool(kwargs.get("use_cache")))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if ranges.order is not None:
        k, v = k.index_select(0, ranges.order), v.index_select(0, ranges.order)
    if s_aux is not None and s_aux.dim() != 1:
        s_aux = s_aux.reshape(-1)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out, _ = torch.ops.packattn.attention_forward(
        q, k, v, ranges.key_begin, ranges.key_end, s_aux, scale, float(softcap or 0.0)
    )
    return out.view(batch, queries, heads, value.shape[-1]), None


def _refuse(module: torch.nn.Module, dropout: float, position_bias: Tensor | None, kwargs: dict[str, Any]) -> None:
    layer = type(module).__name__
    if position_bias is not None:
        raise ValueError(
            f"packattn: {layer} passes position_bias (a bias on the scores), which cannot be honoured; use "
            'attn_implementation="eager" for this model'
        )
    if dropout:
        raise ValueError(
            f"packattn: {layer} asks for attention dropout {dropout}, which cannot be honoured; set it to 0 in the config "
            "(attention_dropout, attn_pdrop or attention_probs_dropout_prob)"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            'packattn: output_attentions=True cannot be honoured (no weights are formed); use attn_implementation="eager"'
        )
    if kwargs.get("head_mask") is not None:
        raise ValueError(f"packattn: {layer} passes head_mask, which cannot be honoured")
    for name in ("indices", "block_indices", "sinks"):  # DeepSeek V3.2, MiniMax M3, Inkling 2
        if kwargs.get(name) is not None:
            raise ValueError(
                f"packattn: {layer} passes {name} (a choice of keys, or sinks per token), which cannot be honoured; use "
                'attn_implementation="eager" for this model'
            )


def _meets_another_sequence(module: torch.nn.Module) -> str:
    """ "is" for a layer that attends to another sequence than its own, "has" for the other layers of a decoder that has
    such ones, as far as classes, flags and configs say; otherwise ""."""
    config, causal = getattr(module, "config", None), bool(getattr(module, "is_causal", True))
    both = bool(getattr(config, "is_encoder_decoder", False))
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False):
        return "is"
    if causal:
        decoder = both or any(getattr(config, n, None) for n in ("add_cross_attention", "cross_attention_hidden_size"))
        return "has" if decoder else ""
    if hasattr(module, "is_decoder"):  # BART and its kin: one class for all three uses
        return "is" if module.is_decoder else ""
    return "is" if both and not any(part in type(module).__name__ for part in ("Self", "Encoder")) else ""


def _refuse_documents(module: torch.nn.Module, documents: Documents) -> None:
    """Several documents in a row whose cross-attention would see all of the other sequence from each of them."""
    told, positions = documents.name(), documents.position_ids
    if told == "position_ids" and positions is not None:
        if positions.dim() > 2 or positions.shape[-1] < 2 or not _hf_ranges.restarts(positions):
            return
        told = "position_ids that restart"
    if told != "attention_mask":
        raise ValueError(
            f"packattn: {type(module).__name__} belongs to a model with cross-attention, where {told} cannot be honoured: it "
            "says nothing about where the documents lie in the other sequence; give each document a row of its own and leave "
            "it out"
        )


# ---- once per forward, not once per layer ----------------------------------------------------------------------


class _Entry:
    """Ranges that the layers of one forward share, and which layers took them."""

    def __init__(self, key: tuple[Any, ...], sources: tuple[Any, ...], ranges: Ranges) -> None:
        self.key = key
        # Weak: the cache must not keep a batch alive, and an id that is used again must not match.
        self.sources = tuple(None if x is None else weakref.ref(x) for x in sources)
        self.ranges = ranges
        self.seen: set[int] = set()

    def serves(self, key: tuple[Any, ...], sources: tuple[Any, ...], layer: int) -> bool:
        # A layer that comes a second time is in another forward (or recomputes): what the tensors hold may have
        # changed in place since, through memory that no version counter watches.
        return (
            layer not in self.seen
            and self.key == key
            and all(
                x is None if r is None else x is not None and r() is x
                for r, x in zip(self.sources, sources, strict=True)
            )
        )


class _Cache(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_cache = _Cache()
_KINDS = 8  # kinds of layers a model may have (full, sliding, towers) for which ranges are kept


def _versions(sources: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in sources)


def _ranges(
    module: torch.nn.Module,
    shape: Shape,
    attention_mask: Tensor | None,
    documents: Documents,
    device: torch.device,
    caching: bool,
) -> Ranges:
    if torch.compiler.is_compiling():
        return _hf_ranges.resolve(shape, attention_mask, documents, device, look=False)
    d = documents
    sources = (attention_mask, d.packing, d.cu_q, d.cu_k, d.segment_ids, d.position_ids)
    # Tensors made in inference mode cannot be saved for a backward: a teacher's ranges are not the student's.
    key = (shape, device, caching, torch.is_inference_mode_enabled(), _versions(sources))
    entries = _cache.entries
    for entry in entries:
        if entry.serves(key, sources, id(module)):
            entry.seen.add(id(module))
            return entry.ranges
    with torch.no_grad():
        ranges = _hf_ranges.resolve(shape, attention_mask, documents, device, look=_may_look(device))
    _warn(ranges, documents, caching)
    entry = _Entry(key, sources, ranges)
    entry.seen.add(id(module))
    entries[:] = [entry, *(e for e in entries if id(module) not in e.seen)][:_KINDS]
    return ranges


_looks_left = 8  # on an accelerator the values are read back (which waits for it) in the first forwards only


def _may_look(device: torch.device) -> bool:
    global _looks_left
    if device.type == "cpu":
        return True
    _looks_left -= 1
    return _looks_left >= 0


def _warn(ranges: Ranges, documents: Documents, caching: bool) -> None:
    """Says once when a call contradicts itself: sdpa and eager leak between the documents of such a batch."""
    if not ranges.packed:
        return
    source = documents.name()
    if ranges.ones:
        _library.warn_once(
            "transformers: all-ones mask",
            f"packattn: the batch is packed ({source}), but an attention_mask of ones only came with it, which says that "
            "every row is one document. The documents are kept apart; other implementations follow the mask and leak. Leave "
            "attention_mask out.",
        )
    if caching:
        _library.warn_once(
            "transformers: cache",
            f"packattn: the batch is packed ({source}), but use_cache is on. The documents are kept apart; sdpa and eager "
            "stop looking at position_ids with a cache and leak, and decoding cannot go on from a packed cache. Pass "
            "use_cache=False.",
        )
