"""Which keys each query row of a [B, S] batch sees, from what a transformers model passes to its attention.

Everything here is O(S) tensor arithmetic of static shape: no step depends on how many documents there are, so it runs
inside a compiled model. Indices are local to a batch row until :func:`resolve` flattens them. B is the batch, Q and K
the query and key lengths (they differ while a cache is decoded).

A *range mask* is what the mask builder hands through the model to the attention function: int32
[B, 1, 1, 3 * Q + K + 3], which holds, for each batch row, the first visible key of every query [Q], one past the last
[Q], the first key of its document as far as transformers found documents [Q] (used where nothing better is known), which
keys are tokens and not padding [K] (0 or 1), the chunk size (0: none), the key on the diagonal of the first query, and
flags: EXACT (lo and hi say everything: the model made a mask of its own), GIVEN (there was an attention_mask), WINDOW
(lo and hi have the window already: encoders count it otherwise than their layers say). With EXACT or WINDOW the layers'
window does not apply on top. It is 4-D because models pass 4-D masks on untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..packing import Packing

EXACT, GIVEN, WINDOW = 1, 2, 4
_TAIL = 3  # last entries of a range mask: chunk size, diagonal offset, flags


@dataclass(frozen=True)
class Documents:
    """Where the boundaries come from. Exactly one of the fields is used, the first that is not None."""

    packing: Packing | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    segment_ids: Tensor | None = None
    position_ids: Tensor | None = None

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Documents:
        """From the keyword arguments of a call, under any name that is used for them.

        Raises:
            TypeError: an argument that is no tensor, or no Packing.
        """
        packing = kwargs.get("packing")
        if packing is not None and not isinstance(packing, Packing):
            raise TypeError(f"packattn: packing must be a packattn.Packing, got {type(packing).__name__}")
        return cls(
            packing,
            _first(kwargs, "cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens", "cu_seqlens"),
            _first(kwargs, "cu_seq_lens_k", "cu_seqlens_k"),
            _first(kwargs, "seq_idx", "segment_ids"),
            _first(kwargs, "position_ids"),
        )

    def name(self) -> str:
        for field, label in (
            (self.packing, "packing"),
            (self.cu_q, "cu_seq_lens"),
            (self.segment_ids, "segment ids"),
            (self.position_ids, "position_ids"),
        ):
            if field is not None:
                return label
        return "attention_mask"


def _first(kwargs: Mapping[str, Any], *names: str) -> Tensor | None:
    for name in names:
        value = kwargs.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"packattn: {name} must be a tensor, got {type(value).__name__}")
        return value
    return None


@dataclass(frozen=True)
class Shape:
    """What a layer asks for: B, Q, K, causal, window (tokens on each side, -1: no limit)."""

    batch: int
    queries: int
    keys: int
    causal: bool
    window: int


@dataclass(frozen=True)
class Ranges:
    """key_begin, key_end int32 [B * Q] into the flattened keys; order int64 [B * K] or None: take the keys in this
    order first (tokens before padding, where padding lies between tokens of one document).

    packed: whether a batch row holds several documents. ones: whether there was a padding mask that hid nothing. Both
    None where not looked at.
    """

    key_begin: Tensor
    key_end: Tensor
    order: Tensor | None
    packed: bool | None = None
    ones: bool | None = None


def pack_range_mask(
    lo: Tensor, hi: Tensor, begin: Tensor, real: Tensor, offset: int | Tensor, chunk: int = 0, flags: int = 0
) -> Tensor:
    """lo, hi, begin [B, Q], real [B, K] -> the range mask. offset: the key on the first query's diagonal."""
    zero = torch.zeros(lo.shape[0], dtype=torch.int64, device=lo.device)
    tail = torch.stack([zero + chunk, zero + offset, zero + flags], 1)
    return torch.cat([x.int() for x in (lo, hi, begin, real, tail)], 1)[:, None, None, :]


def is_range_mask(mask: Tensor, shape: Shape) -> bool:
    wanted = (shape.batch, 1, 1, 3 * shape.queries + shape.keys + _TAIL)
    return mask.dtype == torch.int32 and tuple(mask.shape) == wanted


def document_bounds(ids: Tensor, step: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """First row and one past the last row of every token's document, int64 [B, S] each.

    ids [B, S]: a document goes on where ``ids[t] == ids[t - 1] + step`` (1: positions, 0: segment ids). Where ``real``
    [B, S] marks padding, a token is compared with the last token before it, and goes on also if the ids went on through
    the padding between them; padding itself stays with the document before it.
    """
    batch, size = ids.shape
    index = torch.arange(size, device=ids.device).expand(batch, size)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1] + step
    if real is not None:
        run = first.long().cumsum(1)
        last = torch.where(real, index, -1).cummax(1).values
        before = torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
        at = before.clamp(min=0)
        goes_on = (ids == ids.gather(1, at) + step) | (run == run.gather(1, at))
        first = real & ((before < 0) | ~goes_on)
    begin = torch.where(first, index, 0).cummax(1).values
    following = torch.nn.functional.pad(torch.where(first, index, size)[:, 1:], (0, 1), value=size)
    end = following.flip(1).cummin(1).values.flip(1)
    return begin, end


def goes_on(ids: Tensor, step: int, real: Tensor) -> tuple[Tensor, Tensor]:
    """Documents of rows with padding at any place, as the layers see them: segment ids [B, S] (padding has that of the
    document before it), and the position of every token in its document, counted over tokens only."""
    begin, _ = document_bounds(ids, step, real)
    count = torch.nn.functional.pad(real.long().cumsum(1), (1, 0))
    positions = count[:, 1:] - 1 - count.gather(1, begin)
    return begin, positions.clamp(min=0)


def restarts(position_ids: Tensor) -> bool:
    """Whether positions [S] or [B, S] are those of several documents. Where values cannot be read, they must not be: asserted."""
    apart = (position_ids[..., 1:] != position_ids[..., :-1] + 1).any()
    if checks.has_values(apart):
        return bool(apart)
    torch._assert_async(
        ~apart, "packattn: position_ids must not restart in cross-attention, or in a layer with other keys"
    )
    return False


def ranges_from_dense(mask: Tensor, op: str = "packattn") -> tuple[Tensor, Tensor, Tensor]:
    """A dense bool mask [B, 1, Q, K] as (lo, hi [B, Q], real [B, K]); keys that nobody sees count as padding.

    Raises:
        ValueError: a row sees keys that are not one run, or the runs move backwards (RuntimeError while compiling).
    """
    visible = mask[:, 0]
    size = visible.shape[-1]
    real = visible.any(1)
    sees = visible.any(-1)
    lo = visible.int().argmax(-1)
    hi = torch.where(sees, size - visible.flip(-1).int().argmax(-1), lo)
    count = torch.nn.functional.pad(real.long().cumsum(1), (1, 0))
    between = count.gather(1, hi) - count.gather(1, lo)
    floor, reach = (torch.where(sees, x, 0).cummax(1).values for x in (lo, hi))
    good = ~sees | ((visible.sum(-1) == between) & (lo == floor) & (hi == reach))
    message = (
        f"{op}: attention_mask must let every row see one run of keys, and later rows no earlier runs (causal, window, "
        "prefix and document masks do)"
    )
    if not checks.has_values(good):
        torch._assert_async(good.all(), message)
    elif not bool(good.all()):
        b, row = (int(x) for x in (~good).nonzero()[0])
        advice = '. Use attn_implementation="sdpa" for this mask' if op == "packattn" else ""
        raise ValueError(f"{message}; row {row} of batch element {b} does not{advice}")
    return lo, hi, real


def dense_from_user(mask: Tensor, shape: Shape) -> Tensor:
    """A 4-D mask that the caller made, as bool [B, 1, Q, K]. Bool: True is visible. Float: 0 is visible, the lowest
    value or -inf hides.

    Raises:
        ValueError: masks per head, another shape, or a float mask with other values (a bias).
    """
    want = f"[{shape.batch} or 1, 1, {shape.queries}, {shape.keys}]"
    if (
        mask.dim() != 4
        or mask.shape[0] not in (1, shape.batch)
        or mask.shape[1] != 1
        or mask.shape[2] not in (1, shape.queries)
        or mask.shape[3] < shape.keys
    ):
        per_head = " (a mask of its own per head cannot be honoured)" if mask.dim() == 4 and mask.shape[1] != 1 else ""
        raise ValueError(
            f"packattn: attention_mask must be 2-D [{shape.batch}, {shape.keys}] or 4-D {want}, got "
            + checks.describe(mask)
            + per_head
        )
    mask = mask[..., : shape.keys]  # masks for a static cache may be longer than the keys
    if mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if checks.has_values(mask) and not bool(((mask == 0) | hidden).all()):
            raise ValueError(
                "packattn: a floating-point attention_mask must hold 0 (visible) and the lowest value (hidden) only; "
                "other values are a bias on the scores, which cannot be honoured"
            )
        mask = ~hidden
    elif mask.dtype != torch.bool:
        raise ValueError(
            f"packattn: a 4-D attention_mask must be bool or floating point, got {checks.describe(mask)}; if it is the "
            "one that packattn made, the model changed its shape on the way"
        )
    return mask.expand(shape.batch, 1, shape.queries, shape.keys)


def resolve(shape: Shape, mask: Tensor | None, documents: Documents, device: torch.device, look: bool) -> Ranges:
    """The key ranges of one kind of layer.

    look: whether values may be read back to tell packed from not packed; never while compiling. What is computed does
    not depend on it: a layer that is computed again (gradient checkpointing) must take the same steps as before.

    Raises:
        ValueError: boundaries or masks that do not fit the shape.
    """
    batch, queries, keys = shape.batch, shape.queries, shape.keys
    row = torch.arange(queries, device=device).expand(batch, queries)
    diagonal: Tensor = row + (keys - queries)
    lo, hi = torch.zeros_like(row), torch.full_like(row, keys)
    real: Tensor | None = None
    found: Tensor | None = None
    chunk: Tensor | None = None
    ids_of_mask: Tensor | None = None
    causal, window = shape.causal, torch.full_like(row[:, :1], shape.window)
    empty: Tensor | None = None
    if documents.cu_q is None and documents.cu_k is not None:
        raise ValueError("packattn: cu_seq_lens_k came without cu_seq_lens_q; pass both")
    if documents.packing is None and documents.cu_k is not None and mask is not None and queries != keys:
        # A mask counts the diagonal over the whole row, these documents each for itself.
        raise ValueError(
            f"packattn: cu_seq_lens_q and cu_seq_lens_k describe {queries} queries and {keys} keys; they cannot be honoured "
            "together with an attention_mask, leave it out"
        )
    if mask is None and documents.packing is None and documents.cu_k is not None:
        diagonal = _diagonal_of(shape, documents.cu_q, documents.cu_k)
    if mask is not None and is_range_mask(mask, shape):
        lo, hi, found, kept, tail = mask[:, 0, 0].long().split([queries, queries, queries, keys, _TAIL], 1)
        real = kept != 0
        chunk, diagonal = tail[:, :1], row + tail[:, 1:2]
        window = torch.where(tail[:, 2:] & (EXACT | WINDOW) != 0, -1, window)
        causal = False  # lo and hi say already what is visible
    elif mask is not None and mask.dim() == 2:
        if tuple(mask.shape) != (batch, keys):
            raise ValueError(f"packattn: attention_mask must be [{batch}, {keys}], got {checks.describe(mask)}")
        real = mask != 0
        if mask.dtype != torch.bool and not mask.is_floating_point() and queries == keys:
            ids_of_mask = mask
        if causal:
            empty = ~real.gather(1, diagonal.clamp(0, keys - 1))
    elif mask is not None:
        lo, hi, real = ranges_from_dense(dense_from_user(mask, shape))
        causal = False
    if causal:
        hi = torch.minimum(hi, diagonal + 1)
    if shape.window >= 0:
        lo = torch.where(window < 0, lo, torch.maximum(lo, diagonal - window))
        if not shape.causal:
            hi = torch.where(window < 0, hi, torch.minimum(hi, diagonal + window + 1))

    begin, end, several = _documents(shape, documents, diagonal, real, ids_of_mask, found)
    if chunk is not None and real is not None and several is not None and queries == keys:
        # Chunks are counted from the first token of each document (not of the row, as lo has it so far).
        start = _next_real(real, keys).gather(1, begin.clamp(0, keys))
        size = chunk.clamp(min=1)
        lo = torch.where(chunk > 0, start + torch.div(diagonal - start, size, rounding_mode="floor") * size, lo)
    lo, hi = torch.maximum(lo, begin), torch.minimum(hi, end)
    if empty is not None:
        hi = torch.where(empty, lo, hi)
    lo, hi = lo.clamp(0, keys), hi.clamp(0, keys)
    hi = torch.maximum(lo, hi)

    order = None
    if real is not None:
        lo, hi, order = _leave_out_padding(lo, hi, real, checks.has_values(real) and device.type == "cpu")
    base = torch.arange(batch, device=device)[:, None] * keys
    if order is None:
        lo, hi = lo + base, hi + base
    packed = bool(several.any()) if look and several is not None else None
    ones = None
    if look and real is not None and mask is not None:
        given = mask.dim() == 2 or (is_range_mask(mask, shape) and bool((mask[..., -1] & GIVEN != 0).all()))
        ones = given and bool(real.all())
    return Ranges(lo.reshape(-1).int(), hi.reshape(-1).int(), order, packed, ones)


def _next_real(real: Tensor, keys: int) -> Tensor:
    """[B, K + 1]: the first token at or after each key; K where there is none."""
    index = torch.arange(keys, device=real.device)
    at = torch.where(real, index, keys).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(at, (0, 1), value=keys)


def _leave_out_padding(lo: Tensor, hi: Tensor, real: Tensor, look: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ranges over tokens only. Padding at the ends of a range is cut off; if some lies inside one, the keys are put in
    another order (tokens first), in which every range is a run again. Returned ranges are flat with an order, local
    to the batch row without. look: whether values may be read, to spare the other order."""
    batch, keys = real.shape
    if look and bool(real.all()):
        return lo, hi, None
    if look:
        count = torch.nn.functional.pad(real.long().cumsum(1), (1, 0))
        first = torch.minimum(_next_real(real, keys).gather(1, lo), hi)
        index = torch.arange(keys, device=real.device)
        last = torch.nn.functional.pad(torch.where(real, index, -1).cummax(1).values, (1, 0), value=-1)
        past = torch.maximum(last.gather(1, hi) + 1, first)
        holes = (count.gather(1, past) - count.gather(1, first)) != past - first
        if not bool(holes.any()):
            return first, past, None
    flat = real.reshape(-1)
    count = torch.nn.functional.pad(flat.long().cumsum(0), (1, 0))
    base = torch.arange(batch, device=real.device)[:, None] * keys
    order = torch.argsort(~flat, stable=True)
    return count[lo + base], count[hi + base], order


def _documents(
    shape: Shape,
    documents: Documents,
    diagonal: Tensor,
    real: Tensor | None,
    ids_of_mask: Tensor | None,
    found: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """begin, end [B, Q]: the keys of each query's document; and per batch row whether it holds several documents (None:
    the layers were told nothing)."""
    batch, queries, keys = shape.batch, shape.queries, shape.keys
    whole = torch.zeros_like(diagonal), torch.full_like(diagonal, keys)
    if documents.packing is not None or documents.cu_q is not None:
        return _explicit(shape, documents)
    ids, step, name = documents.segment_ids, 0, "segment ids"
    if ids is None and documents.position_ids is not None:
        ids, step, name = documents.position_ids, 1, "position_ids"
    if ids is None:
        ids, step, name = ids_of_mask, 0, "attention_mask"
    if ids is None:
        return whole[0] if found is None else found, whole[1], None
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() == 3 and step == 1 and ids.shape[0] == 4:
        ids = ids[0]  # the plane of text positions comes before the three of mRoPE
    if ids.dim() != 2:
        raise ValueError(
            f"packattn: {name} must be [B, S] (or 4 planes [4, B, S], text first), got {checks.describe(ids)}; with "
            "other mRoPE planes say where documents begin: pass cu_seq_lens_q and cu_seq_lens_k, or seq_idx"
        )
    if ids.shape[1] != queries or ids.shape[0] not in (1, batch):
        raise ValueError(
            f"packattn: {name} must be [{batch} or 1, {queries}] like the queries, got {checks.describe(ids)}"
        )
    if ids.is_floating_point():  # rounded, two documents may have one number
        raise ValueError(f"packattn: {name} must be integers, got {checks.describe(ids)}")
    ids = ids.long().expand(batch, queries)
    if queries == keys:
        begin, end = document_bounds(ids, step, real)
        return begin, end, _several(begin, real)
    if name == "segment ids":
        raise ValueError(
            f"packattn: segment ids describe {queries} queries, but there are {keys} keys (a cache); they cannot tell "
            "which keys belong to which document"
        )
    if not shape.causal:
        if restarts(ids):
            raise ValueError(
                f"packattn: position_ids restart, but say nothing about where the documents lie among the {keys} keys of a "
                f"layer that is not causal and has {queries} queries; pass cu_seq_lens_q and cu_seq_lens_k"
            )
        return *whole, None
    if queries == 1:
        return *whole, None
    # A cache, and positions that restart: the first document goes on from the cache, the others see only themselves.
    begin, _ = document_bounds(ids, step, None)
    key_of_begin = diagonal.gather(1, begin)
    kept = None if real is None else real.gather(1, diagonal.clamp(0, keys - 1))
    return torch.where(begin == 0, 0, key_of_begin), whole[1], _several(begin, kept)


def _several(begin: Tensor, real: Tensor | None) -> Tensor:
    """bool [B]: whether the tokens of a row begin at different places."""
    if real is None:
        return (begin != begin[:, :1]).any(1)
    top = torch.iinfo(begin.dtype).max
    return torch.where(real, begin, -1).amax(1) > torch.where(real, begin, top).amin(1)


def _diagonal_of(shape: Shape, cu_q: Tensor | None, cu_k: Tensor) -> Tensor:
    """[B, Q]: the key that each query is aligned with where documents have other lengths in the keys."""
    assert cu_q is not None
    total = shape.batch * shape.queries
    checks.cu_seqlens("packattn", cu_q, total, "cu_seq_lens_q")
    checks.cu_seqlens("packattn", cu_k, shape.batch * shape.keys, "cu_seq_lens_k")
    _, _, diagonal, _ = torch.ops.packattn.document_ranges(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], total)
    base = torch.arange(shape.batch, device=cu_q.device)[:, None] * shape.keys
    local: Tensor = diagonal.long().view(shape.batch, shape.queries) - base
    return local


def _explicit(shape: Shape, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
    """Documents over the flattened batch; one that runs on into the next batch row is cut there."""
    batch, queries, keys = shape.batch, shape.queries, shape.keys
    if documents.packing is not None:
        packing = documents.packing
        if packing.total != batch * queries:
            raise ValueError(
                f"packattn: packing must have {batch} * {queries} tokens like the queries, got {packing!r}"
            )
        if queries != keys:
            raise ValueError(f"packattn: packing describes {queries} queries, but there are {keys} keys (a cache)")
        begin, end = packing.begin, packing.end
    else:
        cu_q = documents.cu_q
        assert cu_q is not None
        cu_k = cu_q if documents.cu_k is None else documents.cu_k
        if queries != keys and documents.cu_k is None:
            raise ValueError(
                f"packattn: cu_seq_lens_q describes {queries} queries, but there are {keys} keys; pass cu_seq_lens_k"
            )
        checks.cu_seqlens("packattn", cu_q, batch * queries, "cu_seq_lens_q")
        checks.cu_seqlens("packattn", cu_k, batch * keys, "cu_seq_lens_k")
        begin, end, _, _ = torch.ops.packattn.document_ranges(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], batch * queries)
    begin, end = begin.long().view(batch, queries), end.long().view(batch, queries)
    base = torch.arange(batch, device=begin.device)[:, None] * keys
    begin, end = ((x - base).clamp(0, keys) for x in (begin, end))
    return begin, end, _several(begin, end > begin)
