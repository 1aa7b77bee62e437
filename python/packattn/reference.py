"""What packattn computes, in plain PyTorch: the specification, the oracle of the tests, and the fallback.

Every function here has the arguments and results of the op of the same name in :mod:`packattn.ops`. They run on any
device and in any floating dtype, float64 included. Optimised code must not import this module; the one exception
is the dispatch in :mod:`packattn.ops`, which calls it where no compiled library serves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import checks

_ROWS = 256  # query rows per block: bounds the score matrix, decides nothing else
_NONE = torch.iinfo(torch.int64).max
_BEYOND_ANY_ROW = 2**33  # larger than any difference of two int32 values: sums with it stay in 64 bits


# ---- attention -------------------------------------------------------------------------------------------------


def _blocks(key_begin: Tensor, key_end: Tensor, total_k: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields (query rows, keys, visible [rows, keys]) for blocks of rows that see anything.

    A block never spans two groups of rows with disjoint keys (two documents): a NaN of one would reach the other
    as 0 x NaN.
    """
    begin = key_begin.long().clamp(0, total_k).tolist()
    end = key_end.long().clamp(0, total_k).tolist()
    first, reach = 0, 0
    for i in range(len(begin) + 1):
        last = i == len(begin)
        if not last and begin[i] >= end[i]:
            continue
        if last or begin[i] >= reach or i - first >= _ROWS:
            seen = [r for r in range(first, i) if begin[r] < end[r]]
            if seen:
                rows = slice(seen[0], seen[-1] + 1)
                keys = slice(min(begin[r] for r in seen), max(end[r] for r in seen))
                j = torch.arange(keys.start, keys.stop, device=key_begin.device)
                visible = (j >= key_begin[rows, None]) & (j < key_end[rows, None])
                yield rows, keys, visible
            first = i
        if not last:
            reach = max(reach, end[i])


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Masked scores [Hkv, G, rows, keys], and the derivative of the soft cap (None without one)."""
    s = torch.einsum("qhgd,khd->hgqk", q, k) * scale
    slope = None
    if softcap > 0:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    return s.masked_fill(~visible, -torch.inf), slope


def _probabilities(s: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    return torch.where(visible, torch.exp(s - lse[..., None]), 0.0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in which row i sees the keys ``key_begin[i] <= j < key_end[i]``."""
    checks.attention("attention_forward", query, key, value, key_begin, key_end, sinks, scale, softcap)
    acc = _accumulator(query.dtype)
    total_q, heads_q, _ = query.shape
    total_k, heads_k, dim_v = value.shape
    group = heads_q // heads_k
    out = query.new_zeros(total_q, heads_q, dim_v)
    lse = query.new_full((heads_q, total_q), -torch.inf, dtype=acc)
    sink = None if sinks is None else sinks.to(acc).view(heads_k, group, 1)
    q = query.to(acc).unflatten(1, (heads_k, group))
    for rows, keys, visible in _blocks(key_begin, key_end, total_k):
        s, _ = _scores(q[rows], key[keys].to(acc), visible, scale, softcap)
        total = torch.logsumexp(s, -1)
        if sink is not None:
            total = torch.logaddexp(total, sink)
        total = total.masked_fill(~visible.any(-1), -torch.inf)
        p = _probabilities(s, total, visible)
        out[rows] = torch.einsum("hgqk,khd->qhgd", p, value[keys].to(acc)).flatten(1, 2).to(out.dtype)
        lse[:, rows] = total.flatten(0, 1)
    return out, lse


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention_forward` (Dao et al., FlashAttention, 2022, appendix B.2).

    With P the probabilities and delta = sum(dout * out) - dlse: dS = P * (dP - delta). The gradient of lse
    is P * dlse, so it only moves delta. A sink is one more key whose value is 0.
    """
    checks.attention("attention_backward", query, key, value, key_begin, key_end, sinks, scale, softcap)
    checks.gradients("attention_backward", dout, dlse, query, value, out, lse)
    acc = _accumulator(query.dtype)
    heads_q, (total_k, heads_k, _) = query.shape[1], key.shape
    group = heads_q // heads_k
    dq, dk, dv = (torch.zeros_like(x, dtype=acc, memory_format=torch.contiguous_format) for x in (query, key, value))
    dsink = query.new_zeros(heads_k, group, dtype=acc)
    q, o, do = (x.to(acc).unflatten(1, (heads_k, group)) for x in (query, out, dout))
    for rows, keys, visible in _blocks(key_begin, key_end, total_k):
        k, v = key[keys].to(acc), value[keys].to(acc)
        total = lse[:, rows].to(acc).unflatten(0, (heads_k, group))
        delta = (o[rows] * do[rows]).sum(-1).permute(1, 2, 0)
        if dlse is not None:
            delta = delta - dlse[:, rows].to(acc).unflatten(0, (heads_k, group))
        s, slope = _scores(q[rows], k, visible, scale, softcap)
        p = _probabilities(s, total, visible)
        ds = torch.where(visible, p * (torch.einsum("qhgd,khd->hgqk", do[rows], v) - delta[..., None]), 0.0)
        if sinks is not None:
            weight = torch.exp(sinks.to(acc).view(heads_k, group, 1) - total)
            dsink -= torch.where(visible.any(-1), weight * delta, 0.0).sum(-1)
        if slope is not None:
            ds = torch.where(visible, ds * slope, 0.0)
        ds = ds * scale
        dq[rows] += torch.einsum("hgqk,khd->qhgd", ds, k).flatten(1, 2)
        dk[keys] += torch.einsum("hgqk,qhgd->khd", ds, q[rows])
        dv[keys] += torch.einsum("hgqk,qhgd->khd", p, do[rows])
    empty = query.new_empty(0, dtype=torch.float32)
    return (
        dq.to(query.dtype),
        dk.to(key.dtype),
        dv.to(value.dtype),
        empty if sinks is None else dsink.flatten().to(sinks.dtype),
    )


# ---- metadata --------------------------------------------------------------------------------------------------
# All of it has the shape of the token axis and no data-dependent step, so that it runs on a GPU without a sync;
# what does look at values (counts, checks) says so.


def cu_seqlens_from_lengths(lengths: Tensor) -> Tensor:
    """int32 [N + 1] offsets of N documents; lengths of any integer shape, read in order."""
    checks.integers("cu_seqlens_from_lengths", "lengths", lengths)
    flat = lengths.reshape(-1).long()
    checks.lengths("cu_seqlens_from_lengths", flat)
    cu = flat.new_zeros(flat.numel() + 1)
    torch.cumsum(flat, 0, out=cu[1:])
    checks.fits_int32("cu_seqlens_from_lengths", "lengths", cu)
    return cu.int()


def _row_starts(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Flattens [S] or [B, S]; returns the stream and which tokens begin a row."""
    flat = ids.reshape(-1)
    width = max(ids.shape[-1], 1)
    return flat, torch.arange(flat.numel(), device=ids.device) % width == 0


def _changes(flat: Tensor, step: int = 0) -> Tensor:
    """True where flat[t] != flat[t - 1] + step; False at t = 0."""
    out = torch.zeros_like(flat, dtype=torch.bool)
    out[1:] = flat[1:] - step != flat[:-1]
    if step > 0:  # the difference may have wrapped around
        out[1:] |= flat[1:] <= flat[:-1]
    return out


def _gather_marks(mark: Tensor, values: Tensor, size: int, fill: Tensor) -> Tensor:
    """int32 [size]: values where mark holds, in order, then fill."""
    slot = torch.where(mark, mark.cumsum(0) - 1, size).clamp(max=size)
    buffer = fill.expand(size + 1).clone()
    buffer.scatter_(0, slot, torch.where(mark, values, fill))
    return buffer[:size].int()


def _document_marks(segment_ids: Tensor, pad_id: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flattened (token index, first-of-run, starts-a-document, ends-a-document)."""
    flat, row_start = _row_starts(segment_ids)
    real = torch.ones_like(flat, dtype=torch.bool) if pad_id is None else flat.long() != pad_id
    first = _changes(flat) | (row_start & real)  # a run of padding goes on over a row's end
    first[:1] = True
    start = first & real
    end = torch.zeros_like(first)
    end[:-1] = real[:-1] & first[1:]
    end[-1:] = real[-1:]
    return torch.arange(flat.numel(), device=flat.device), first, start, end


def documents_from_segment_ids(
    segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
) -> tuple[Tensor, Tensor]:
    """First row and one past the last row of every document, int32 [N] each."""
    checks.ids("documents_from_segment_ids", "segment_ids", segment_ids)
    t, _, start, end = _document_marks(segment_ids, pad_id)
    size = checks.capacity("documents_from_segment_ids", start, max_segments)
    last = torch.where(end, t + 1, 0).amax(0, keepdim=True) if t.numel() else t.new_zeros(1)
    return _gather_marks(start, t, size, last), _gather_marks(end, t + 1, size, last)


def cu_seqlens_from_segment_ids(
    segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
) -> Tensor:
    """int32 [M + 1] offsets: a boundary where the value changes and at every row start."""
    checks.ids("cu_seqlens_from_segment_ids", "segment_ids", segment_ids)
    t, first, _, end = _document_marks(segment_ids, pad_id)
    last = torch.where(end, t + 1, 0).amax(0, keepdim=True) if t.numel() else t.new_zeros(1)
    first = first & (t < last)  # padding at the very end lies past the offsets
    size = checks.capacity("cu_seqlens_from_segment_ids", first, max_segments)
    return _gather_marks(first, t, size + 1, last)


def cu_seqlens_from_position_ids(position_ids: Tensor, rule: str = "step", max_segments: int | None = None) -> Tensor:
    """int32 [M + 1] offsets: a document starts where positions do not go on ("step") or are 0 ("zero")."""
    checks.ids("cu_seqlens_from_position_ids", "position_ids", position_ids)
    checks.rule("cu_seqlens_from_position_ids", rule)
    flat, first = _row_starts(position_ids)
    first = first | (_changes(flat, 1) if rule == "step" else flat == 0)
    size = checks.capacity("cu_seqlens_from_position_ids", first, max_segments)
    t = torch.arange(flat.numel(), device=flat.device)
    return _gather_marks(first, t, size + 1, t.new_full((1,), flat.numel()))


def _entry_of_token(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(t, last n with offsets[n] <= t), -1 where there is none."""
    t = torch.arange(total, device=offsets.device)
    return t, torch.searchsorted(offsets.long().contiguous(), t, right=True) - 1


def position_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [total], 0 at every document's first token; rows past the last offset count from 0 as well."""
    checks.cu_seqlens("position_ids_from_cu_seqlens", cu_seqlens, total)
    t, n = _entry_of_token(cu_seqlens, total)
    return t - cu_seqlens.long()[n.clamp(min=0)]


def segment_ids_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Tensor:
    """int32 [total], the number of each token's document; -1 past the last offset."""
    checks.cu_seqlens("segment_ids_from_cu_seqlens", cu_seqlens, total)
    t, n = _entry_of_token(cu_seqlens, total)
    return torch.where(t < cu_seqlens[-1], n, -1).int()


def document_ranges(
    starts_q: Tensor, ends_q: Tensor, starts_k: Tensor, ends_k: Tensor, total_q: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per query row: its document's keys [begin, end), the key on the row's diagonal, its document's number.

    All int32 [total_q]. The last rows of a document's q and k are aligned (bottom-right), so the diagonal of row i
    is start_k + (i - start_q) + (length_k - length_q). A row of no document has begin = end = diagonal = the end of
    the document before it, and number -1: an empty range that keeps begin and end nondecreasing.
    """
    checks.documents("document_ranges", starts_q, ends_q, starts_k, ends_k, total_q)
    if starts_q.numel() == 0:
        zero = torch.zeros(total_q, dtype=torch.int32, device=starts_q.device)
        return zero, zero.clone(), zero.clone(), zero - 1
    t, n = _entry_of_token(starts_q, total_q)
    at = n.clamp(min=0)
    inside = (n >= 0) & (t < ends_q[at])
    end = torch.where(n >= 0, ends_k[at], 0)
    begin = torch.where(inside, starts_k[at], end)
    diagonal = torch.where(inside, ends_k[at] - (ends_q[at] - t), end)
    return begin.int(), end.int(), diagonal.int(), torch.where(inside, n, -1).int()


def key_ranges(
    begin: Tensor,
    end: Tensor,
    diagonal: Tensor | None,
    prefix_end: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The keys [key_begin, key_end) that each row sees, int32 [T]: the document cut by the pattern."""
    checks.pattern("key_ranges", begin, end, diagonal, prefix_end, window_left, window_right, chunk_size)
    window_left, window_right, chunk_size = (min(n, _BEYOND_ANY_ROW) for n in (window_left, window_right, chunk_size))
    lo, hi = begin.long(), end.long()
    first, last = lo, hi
    p = torch.arange(lo.numel(), device=lo.device) if diagonal is None else diagonal.long()
    if window_left >= 0:
        lo = torch.maximum(lo, p - window_left)
    if chunk_size > 0:
        lo = torch.maximum(lo, first + torch.div(p - first, chunk_size, rounding_mode="floor") * chunk_size)
    if causal:
        hi = torch.minimum(hi, p + 1)
    elif window_right >= 0:
        hi = torch.minimum(hi, p + window_right + 1)
    if prefix_end is not None:
        hi = torch.maximum(hi, torch.minimum(prefix_end.long(), last))
    lo = torch.minimum(lo, last)
    hi = torch.minimum(torch.maximum(hi, lo), last)
    return lo.int(), hi.int()


def query_ranges(key_begin: Tensor, key_end: Tensor, total_k: int) -> tuple[Tensor, Tensor]:
    """The transpose: the rows [query_begin, query_end) that see each key, int32 [total_k]; empty rows in between
    do not count, and a key that nobody sees has query_begin == query_end."""
    checks.ranges("query_ranges", key_begin, key_end)
    checks.range_values("query_ranges", key_begin, key_end, total_k)
    empty = key_begin >= key_end
    j = torch.arange(total_k, device=key_begin.device)
    if key_begin.numel() == 0:
        zero = torch.zeros(total_k, dtype=torch.int32, device=key_begin.device)
        return zero, zero.clone()
    reach = torch.where(empty, 0, key_end.long()).cummax(0).values
    onset = torch.where(empty, _NONE, key_begin.long()).flip(0).cummin(0).values.flip(0)
    first = torch.searchsorted(reach, j, right=True)
    past = torch.searchsorted(onset.contiguous(), j, right=True)
    return first.int(), torch.maximum(first, past).int()
