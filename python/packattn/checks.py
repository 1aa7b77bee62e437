"""Refusals: each names the argument, what was wanted and what came. Shared by the reference and the fakes.

Shapes and dtypes are always checked. Values are checked where that costs nothing (CPU tensors, outside of tracing);
on other devices they are checked under ``PACKATTN_VALIDATE=1`` (it waits for the device).
"""

from __future__ import annotations

import os
import reprlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

INT32_MAX = torch.iinfo(torch.int32).max
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def has_values(x: object) -> bool:
    """Whether x is a tensor with data, not one that only stands for it while a graph is traced."""
    return isinstance(x, Tensor) and not (torch.compiler.is_compiling() or is_fake(x) or x.is_meta)


def readable(x: Tensor) -> bool:
    """Whether the values of x may be looked at here."""
    if not has_values(x):
        return False
    return x.device.type == "cpu" or os.environ.get("PACKATTN_VALIDATE") == "1"


def describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    return f"{type(x).__name__} {reprlib.repr(x)}"


def _want(ok: bool, op: str, name: str, wanted: str, came: object) -> None:
    if not ok:
        raise ValueError(f"{op}: {name} must be {wanted}, got {came if isinstance(came, str) else describe(came)}")


def integers(op: str, name: str, x: Tensor) -> None:
    _want(isinstance(x, Tensor), op, name, "a tensor", x)
    _want(x.dtype in (torch.int32, torch.int64), op, name, "int32 or int64", x)


def ids(op: str, name: str, x: Tensor) -> None:
    integers(op, name, x)
    if x.dim() == 3:
        raise ValueError(
            f"{op}: {name} is 3-D {list(x.shape)} (several position planes, as for mRoPE); choose a plane, for instance "
            f"{name}[0], or plane=0 where the function takes it"
        )
    _want(x.dim() in (1, 2), op, name, "1-D [T] or 2-D [B, S]", x)


def rule(op: str, value: str) -> None:
    _want(value in ("step", "zero"), op, "rule", '"step" or "zero"', repr(value))


def lengths(op: str, flat: Tensor) -> None:
    if readable(flat) and flat.numel() and int(flat.min()) < 0:
        n = int(flat.argmin())
        raise ValueError(f"{op}: lengths must not be negative, got lengths[{n}] = {int(flat[n])}")
    # Below this bound, their sum stays inside int64.
    if readable(flat) and flat.numel() and int(flat.max()) > INT32_MAX:
        n = int(flat.argmax())
        raise ValueError(
            f"{op}: lengths must be at most {INT32_MAX} (int32 offsets), got lengths[{n}] = {int(flat[n])}"
        )


def fits_int32(op: str, name: str, cu: Tensor) -> None:
    if readable(cu) and int(cu[-1]) > INT32_MAX:
        raise ValueError(f"{op}: {name} must add up to at most {INT32_MAX} tokens (int32 offsets), got {int(cu[-1])}")


def capacity(op: str, mark: Tensor, max_segments: int | None) -> int:
    """How many entries to make room for; counting them (max_segments=None) waits for the device."""
    if max_segments is None:
        return int(mark.sum())
    _want(max_segments >= 0, op, "max_segments", "at least 0", str(max_segments))
    if readable(mark) and int(mark.sum()) > max_segments:
        raise ValueError(
            f"{op}: max_segments must be at least the number of segments, {int(mark.sum())}, got {max_segments}"
        )
    return max_segments


def cu_seqlens(op: str, cu: Tensor, total: int | None, name: str = "cu_seqlens") -> None:
    integers(op, name, cu)
    _want(cu.dim() == 1 and cu.shape[0] >= 1, op, name, "1-D [N + 1], at least one entry", cu)
    if total is not None:
        _want(total >= 0, op, "total", "at least 0", str(total))
    if not readable(cu):
        return
    first, last = int(cu[0]), int(cu[-1])
    _want(first == 0, op, name, "offsets that start at 0", f"{name}[0] = {first}")
    drop = cu[1:] < cu[:-1]
    if bool(drop.any()):
        n = int(drop.nonzero()[0]) + 1
        raise ValueError(f"{op}: {name} must not decrease, got {int(cu[n - 1])} then {int(cu[n])} at entry {n}")
    if total is not None:
        _want(last <= total, op, name, f"offsets up to total = {total}", f"{name}[-1] = {last}")
    _want(last <= INT32_MAX, op, name, f"offsets up to {INT32_MAX}", f"{name}[-1] = {last}")


def documents(op: str, starts_q: Tensor, ends_q: Tensor, starts_k: Tensor, ends_k: Tensor, total_q: int) -> None:
    named = {"starts_q": starts_q, "ends_q": ends_q, "starts_k": starts_k, "ends_k": ends_k}
    for name, x in named.items():
        integers(op, name, x)
        _want(x.dim() == 1, op, name, "1-D [N], one entry per document", x)
        _want(x.device == starts_q.device, op, name, f"on {starts_q.device} like starts_q", x)
    _want(starts_q.shape == ends_q.shape, op, "ends_q", f"as long as starts_q ({starts_q.shape[0]})", ends_q)
    _want(starts_k.shape == ends_k.shape, op, "ends_k", f"as long as starts_k ({starts_k.shape[0]})", ends_k)
    if starts_q.shape != starts_k.shape:
        raise ValueError(
            f"{op}: q and k must hold the same number of documents, got {starts_q.shape[0]} and {starts_k.shape[0]}"
        )
    _want(total_q >= 0, op, "total_q", "at least 0", str(total_q))
    if not readable(starts_q):
        return
    for side, starts, ends, total in (("q", starts_q, ends_q, total_q), ("k", starts_k, ends_k, INT32_MAX)):
        before = torch.cat([ends.new_zeros(1), ends])[:-1]
        wrong = (starts < before) | (ends < starts) | (ends > total)
        if bool(wrong.any()):
            n = int(wrong.nonzero()[0])
            raise ValueError(
                f"{op}: document {n} of {side} must satisfy {int(before[n])} <= start <= end <= {total}, "
                f"got starts_{side}[{n}] = {int(starts[n])}, ends_{side}[{n}] = {int(ends[n])}"
            )


def ranges(op: str, key_begin: Tensor, key_end: Tensor, total_q: int | None = None) -> None:
    for name, x in (("key_begin", key_begin), ("key_end", key_end)):
        _want(x.dtype == torch.int32, op, name, "int32", x)
        _want(x.dim() == 1, op, name, "1-D [total_q]", x)
        if total_q is not None:
            _want(x.shape[0] == total_q, op, name, f"[total_q] = [{total_q}]", x)
    _want(key_begin.shape == key_end.shape, op, "key_end", f"as long as key_begin ({key_begin.shape[0]})", key_end)
    _want(key_end.device == key_begin.device, op, "key_end", f"on {key_begin.device} like key_begin", key_end)


def range_values(op: str, key_begin: Tensor, key_end: Tensor, total_k: int) -> None:
    _want(total_k >= 0, op, "total_k", "at least 0", str(total_k))
    if not readable(key_begin):
        return
    seen = (key_begin < key_end).nonzero().flatten()
    b, e = key_begin[seen], key_end[seen]
    wrong = (b < 0) | (e > total_k)
    wrong[1:] |= (b[1:] < b[:-1]) | (e[1:] < e[:-1])
    if bool(wrong.any()):
        n = int(wrong.nonzero()[0])
        row = int(seen[n])
        last = f"; the row before has {int(b[n - 1])}, {int(e[n - 1])}" if n else ""
        raise ValueError(
            f"{op}: key_begin and key_end must not decrease over the rows that see anything and must lie in "
            f"[0, total_k = {total_k}], got key_begin[{row}] = {int(b[n])}, key_end[{row}] = {int(e[n])}{last}"
        )


def pattern(
    op: str,
    begin: Tensor,
    end: Tensor,
    diagonal: Tensor | None,
    prefix_end: Tensor | None,
    window_left: int,
    window_right: int,
    chunk_size: int,
) -> None:
    for name, x in (("begin", begin), ("end", end), ("diagonal", diagonal), ("prefix_end", prefix_end)):
        if x is None:
            continue
        _want(x.dtype == torch.int32, op, name, "int32", x)
        _want(x.dim() == 1 and x.shape == begin.shape, op, name, f"1-D, as long as begin ({begin.shape[0]})", x)
        _want(x.device == begin.device, op, name, f"on {begin.device} like begin", x)
    for name, n in (("window_left", window_left), ("window_right", window_right)):
        _want(n >= -1, op, name, "at least -1 (-1: no limit)", str(n))
    _want(chunk_size >= 0, op, "chunk_size", "at least 0 (0: no chunks)", str(chunk_size))


def attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_begin: Tensor,
    key_end: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    for name, x, shape in (
        ("query", query, "[total_q, heads_q, head_dim]"),
        ("key", key, "[total_k, heads_k, head_dim]"),
        ("value", value, "[total_k, heads_k, head_dim_v]"),
    ):
        _want(x.dim() == 3, op, name, f"3-D {shape}", x)
        _want(x.dtype in FLOATS, op, name, "float32, bfloat16, float16 or float64", x)
        _want(x.dtype == query.dtype, op, name, f"{str(query.dtype).removeprefix('torch.')} like query", x)
        _want(x.device == query.device, op, name, f"on {query.device} like query", x)
        _want(x.shape[1] >= 1 and x.shape[2] >= 1, op, name, f"{shape} with at least one head and one element", x)
    _want(key.shape[2] == query.shape[2], op, "key", f"of head_dim {query.shape[2]} like query", key)
    _want(
        value.shape[:2] == key.shape[:2], op, "value", f"[{key.shape[0]}, {key.shape[1]}, head_dim_v] like key", value
    )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{op}: heads_q must be a multiple of heads_k, got {query.shape[1]} query heads and {key.shape[1]} key heads"
        )
    ranges(op, key_begin, key_end, query.shape[0])
    for name, y in (("key_begin", key_begin), ("key_end", key_end), ("sinks", sinks)):
        if y is not None:
            _want(y.device == query.device, op, name, f"on {query.device} like query", y)
    if sinks is not None:
        _want(sinks.dtype in FLOATS, op, "sinks", "float32, bfloat16, float16 or float64", sinks)
        _want(
            sinks.dim() == 1 and sinks.shape[0] == query.shape[1], op, "sinks", f"[heads_q] = [{query.shape[1]}]", sinks
        )
    # Kernels compute in float32, where a finite float may not be finite.
    _want(abs(scale) <= FLOAT32_MAX, op, "scale", "finite in float32", str(scale))
    _want(0 <= softcap <= FLOAT32_MAX, op, "softcap", "at least 0 (0: no cap) and finite in float32", str(softcap))
    # Its inverse, and the cap in units of log 2, must be finite as well.
    _want(softcap == 0 or 1e-30 <= softcap <= 1e30, op, "softcap", "0 (no cap) or from 1e-30 to 1e30", str(softcap))
    range_values(op, key_begin, key_end, key.shape[0])


def gradients(
    op: str, dout: Tensor, dlse: Tensor | None, query: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> None:
    """What a backward takes beyond the forward's arguments, which :func:`attention` has checked."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    like_out = (query.shape[0], query.shape[1], value.shape[2])
    like_lse = (query.shape[1], query.shape[0])
    for name, x, dtype, meaning, shape in (
        ("out", out, query.dtype, "[total_q, heads_q, head_dim_v]", like_out),
        ("dout", dout, query.dtype, "[total_q, heads_q, head_dim_v]", like_out),
        ("lse", lse, wide, "[heads_q, total_q]", like_lse),
        ("dlse", dlse, wide, "[heads_q, total_q]", like_lse),
    ):
        if x is None:
            continue
        wanted = f"{str(dtype).removeprefix('torch.')} {meaning} = {list(shape)}"
        _want(x.dtype == dtype and x.shape == shape, op, name, wanted, x)
        _want(x.device == query.device, op, name, f"on {query.device} like query", x)
