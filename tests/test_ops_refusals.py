"""Every refusal of every op of torch.ops.packattn: it names the op, the argument, what was wanted and what came.

Each case runs twice, through the op and through its plain-PyTorch twin, and both messages must hold the same facts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import packattn
from packattn import ops, reference

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Refusal:
    op: str
    name: str
    arguments: Callable[[], dict[str, Any]]  # what differs from the op's valid call
    facts: tuple[str, ...] = field(repr=False)  # what the message must hold


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tokens(total: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(total, heads, dim, dtype=dtype)


# One call of each op that is right; every case changes some of its arguments.
VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "cu_seqlens_from_lengths": lambda: {"lengths": i32(3, 4)},
    "cu_seqlens_from_segment_ids": lambda: {"segment_ids": i32(1, 1, 2, 3, 0), "pad_id": 0, "max_segments": 4},
    "documents_from_segment_ids": lambda: {"segment_ids": i32(1, 1, 2, 3, 0), "pad_id": 0, "max_segments": 4},
    "cu_seqlens_from_position_ids": lambda: {"position_ids": i64(0, 1, 0, 0), "rule": "step", "max_segments": 4},
    "position_ids_from_cu_seqlens": lambda: {"cu_seqlens": i32(0, 3, 7), "total": 8},
    "segment_ids_from_cu_seqlens": lambda: {"cu_seqlens": i32(0, 3, 7), "total": 8},
    "document_ranges": lambda: {
        "starts_q": i32(0, 4),
        "ends_q": i32(3, 6),
        "starts_k": i32(0, 2),
        "ends_k": i32(2, 9),
        "total_q": 6,
    },
    "key_ranges": lambda: {
        "begin": i32(0, 0, 2),
        "end": i32(2, 2, 3),
        "diagonal": i32(0, 1, 2),
        "prefix_end": i32(1, 1, 2),
        "causal": True,
        "window_left": -1,
        "window_right": -1,
        "chunk_size": 0,
    },
    "query_ranges": lambda: {"key_begin": i32(0, 0, 2), "key_end": i32(1, 2, 3), "total_k": 5},
    "attention_forward": lambda: {
        "query": tokens(3, 4, 16),
        "key": tokens(5, 2, 16),
        "value": tokens(5, 2, 8),
        "key_begin": i32(0, 0, 2),
        "key_end": i32(1, 2, 3),
        "sinks": torch.zeros(4),
        "scale": 0.25,
        "softcap": 0.0,
    },
    "attention_backward": lambda: {
        "dout": tokens(3, 4, 8),
        "dlse": torch.zeros(4, 3),
        "query": tokens(3, 4, 16),
        "key": tokens(5, 2, 16),
        "value": tokens(5, 2, 8),
        "out": tokens(3, 4, 8),
        "lse": torch.ones(4, 3),
        "key_begin": i32(0, 0, 2),
        "key_end": i32(1, 2, 3),
        "sinks": torch.zeros(4),
        "scale": 0.25,
        "softcap": 0.0,
    },
    "attention": lambda: {
        "query": tokens(7, 4, 16),
        "key": tokens(9, 2, 16),
        "value": tokens(9, 2, 8),
        "cu_seqlens_q": i32(0, 3, 7),
        "cu_seqlens_k": i32(0, 5, 9),
    },
}

CASES: list[Refusal] = []


def refuse(op: str, name: str, arguments: Callable[[], dict[str, Any]], *facts: str) -> None:
    CASES.append(Refusal(op, name, arguments, facts))


# ---- metadata ------------------------------------------------------------------------------------------------------

OP = "cu_seqlens_from_lengths"
refuse(OP, "float", lambda: {"lengths": torch.ones(2)}, "lengths must be int32 or int64", "float32 [2]")
refuse(OP, "int16", lambda: {"lengths": torch.ones(2, dtype=torch.int16)}, "int32 or int64", "int16 [2]")
refuse(OP, "negative", lambda: {"lengths": i32(3, -4, 2)}, "lengths must not be negative", "lengths[1] = -4")
refuse(OP, "sum", lambda: {"lengths": i64(INT32_MAX, 1)}, "lengths", str(INT32_MAX))
refuse(OP, "one_too_long", lambda: {"lengths": i64(2**40)}, "lengths", str(INT32_MAX), str(2**40))
refuse(OP, "sum_overflows_int64", lambda: {"lengths": i64(2**63 - 1, 2)}, "lengths", str(INT32_MAX))

for OP, IDS in (
    ("cu_seqlens_from_segment_ids", "segment_ids"),
    ("documents_from_segment_ids", "segment_ids"),
    ("cu_seqlens_from_position_ids", "position_ids"),
):
    for KIND, MAKE, FACTS in (
        ("float", lambda: torch.zeros(4), ("must be int32 or int64", "float32 [4]")),
        ("bool", lambda: torch.zeros(4, dtype=torch.bool), ("must be int32 or int64", "bool [4]")),
        ("scalar", lambda: torch.tensor(3), ("must be 1-D [T] or 2-D [B, S]", "int64 []")),
        ("planes", lambda: torch.zeros(3, 1, 8, dtype=torch.int64), ("choose a plane", "[3, 1, 8]")),
        ("4d", lambda: torch.zeros(2, 1, 1, 3, dtype=torch.int64), ("1-D [T] or 2-D [B, S]", "int64 [2, 1, 1, 3]")),
    ):
        refuse(OP, KIND, lambda name=IDS, make=MAKE: {name: make()}, IDS, *FACTS)
    refuse(OP, "no_room", lambda: {"max_segments": 2}, "max_segments", "at least", "3", "got 2")
    refuse(OP, "max_segments", lambda: {"max_segments": -1}, "max_segments must be at least 0", "-1")

OP = "cu_seqlens_from_position_ids"
refuse(OP, "rule", lambda: {"rule": "jump"}, 'rule must be "step" or "zero"', "'jump'")

for OP in ("position_ids_from_cu_seqlens", "segment_ids_from_cu_seqlens"):
    refuse(OP, "float", lambda: {"cu_seqlens": torch.zeros(3)}, "cu_seqlens must be int32 or int64", "float32 [3]")
    refuse(OP, "2d", lambda: {"cu_seqlens": i32(0, 3)[None]}, "cu_seqlens must be 1-D [N + 1]", "int32 [1, 2]")
    refuse(OP, "scalar", lambda: {"cu_seqlens": torch.tensor(0)}, "cu_seqlens must be 1-D [N + 1]", "int64 []")
    refuse(OP, "no_entry", lambda: {"cu_seqlens": i32()}, "cu_seqlens", "at least one entry")
    refuse(OP, "start", lambda: {"cu_seqlens": i32(1, 3)}, "cu_seqlens", "start at 0", "cu_seqlens[0] = 1")
    refuse(OP, "negative", lambda: {"cu_seqlens": i32(-1, 3)}, "cu_seqlens", "start at 0", "cu_seqlens[0] = -1")
    refuse(OP, "decreasing", lambda: {"cu_seqlens": i64(0, 5, 2, 7)}, "cu_seqlens", "decreas", "5", "2")
    refuse(OP, "past_total", lambda: {"cu_seqlens": i64(0, 5, 9)}, "cu_seqlens", "total = 8", "= 9")
    refuse(OP, "past_int32", lambda: {"cu_seqlens": i64(0, 2**31)}, "cu_seqlens", f"= {2**31}")
    refuse(OP, "total", lambda: {"total": -1}, "total must be", "-1")

OP = "document_ranges"
for NAME in ("starts_q", "ends_q", "starts_k", "ends_k"):
    refuse(OP, f"{NAME}_float", lambda n=NAME: {n: torch.zeros(2)}, f"{NAME} must be int32 or int64", "float32 [2]")
    refuse(OP, f"{NAME}_2d", lambda n=NAME: {n: i32(0, 1)[None]}, f"{NAME} must be 1-D [N]", "int32 [1, 2]")
refuse(OP, "ends_q_short", lambda: {"ends_q": i32(3)}, "ends_q must be as long as starts_q (2)", "int32 [1]")
refuse(OP, "ends_k_short", lambda: {"ends_k": i64(3)}, "ends_k must be as long as starts_k (2)", "int64 [1]")
refuse(OP, "count", lambda: {"starts_k": i32(0), "ends_k": i32(2)}, "same number of documents", "got 2 and 1")
refuse(OP, "total_q", lambda: {"total_q": -2}, "total_q must be", "-2")
refuse(OP, "negative", lambda: {"starts_q": i32(-3, 4)}, "starts_q[0] = -3")
refuse(OP, "end_before_start", lambda: {"ends_q": i32(3, 2)}, "ends_q[1] = 2", "4")
refuse(OP, "decreasing", lambda: {"starts_k": i32(5, 2), "ends_k": i32(6, 9)}, "starts_k[1] = 2")
refuse(OP, "overlap", lambda: {"ends_q": i32(5, 6)}, "starts_q[1] = 4", "5")
refuse(OP, "past_total_q", lambda: {"ends_q": i32(3, 7)}, "ends_q[1] = 7", "6")
refuse(OP, "past_int32", lambda: {"ends_k": i64(2, 2**31)}, f"ends_k[1] = {2**31}", str(INT32_MAX))
refuse(OP, "int64_min", lambda: {"starts_k": i64(-(2**63), 2)}, f"starts_k[0] = {-(2**63)}")

OP = "key_ranges"
refuse(OP, "begin_2d", lambda: {"begin": i32(0, 0, 2)[None]}, "begin must be", "int32 [1, 3]")
for NAME in ("begin", "end", "diagonal", "prefix_end"):
    refuse(OP, f"{NAME}_int64", lambda n=NAME: {n: i64(0, 0, 2)}, f"{NAME} must be int32", "int64 [3]")
    if NAME != "begin":
        refuse(OP, f"{NAME}_short", lambda n=NAME: {n: i32(0, 0)}, f"{NAME} must be", "3", "int32 [2]")
for NAME in ("window_left", "window_right"):
    refuse(OP, NAME, lambda n=NAME: {n: -2}, f"{NAME} must be at least -1", "-2")
refuse(OP, "chunk_size", lambda: {"chunk_size": -1}, "chunk_size must be at least 0", "-1")

# ---- ranges, wherever they are read --------------------------------------------------------------------------------


def as_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call in the dtype that no compiled kernel serves."""
    floats = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.dtype == torch.float32}
    return arguments | {n: x.double() for n, x in floats.items()}


for OP in ("query_ranges", "attention_forward", "attention_backward"):
    refuse(OP, "key_begin_int64", lambda: {"key_begin": i64(0, 0, 2)}, "key_begin must be int32", "int64 [3]")
    refuse(OP, "key_end_float", lambda: {"key_end": torch.zeros(3)}, "key_end must be int32", "float32 [3]")
    refuse(OP, "key_begin_2d", lambda: {"key_begin": i32(0, 0, 2)[None]}, "key_begin must be", "int32 [1, 3]")
    refuse(OP, "key_end_short", lambda: {"key_end": i32(1, 2)}, "key_end must be", "3", "int32 [2]")
    for WIDE in (False, True) if OP != "query_ranges" else (False,):
        for KIND, BEGIN, END, FACTS in (
            ("negative", (-1, 0, 2), (1, 2, 3), ("key_begin", "-1")),
            ("past_total_k", (0, 0, 2), (1, 2, 6), ("key_end", "5", "6")),
            ("far_past_total_k", (0, 0, 2), (1, 2, INT32_MAX), ("key_end", "5", str(INT32_MAX))),
            ("begin_decreases", (0, 2, 1), (1, 3, 3), ("key_begin", "decreas", "1", "2")),
            ("end_decreases", (0, 0, 0), (1, 3, 2), ("key_end", "decreas", "2", "3")),
            ("decreases_over_an_empty_row", (3, 4, 0), (4, 0, 5), ("key_begin", "decreas", "0", "3")),
        ):
            refuse(
                OP,
                f"{KIND}_float64" if WIDE else KIND,
                lambda op=OP, wide=WIDE, begin=BEGIN, end=END: (
                    (as_float64(VALID[op]()) if wide else {}) | {"key_begin": i32(*begin), "key_end": i32(*end)}
                ),
                *FACTS,
            )
refuse("query_ranges", "total_k", lambda: {"total_k": -1}, "total_k must be", "-1")

# ---- attention -----------------------------------------------------------------------------------------------------

for OP in ("attention_forward", "attention_backward"):
    for NAME, DIMS in (("query", "[total_q, heads_q, head_dim]"), ("key", "[total_k,"), ("value", "[total_k,")):
        refuse(OP, f"{NAME}_2d", lambda n=NAME: {n: torch.ones(3, 4)}, f"{NAME} must be 3-D {DIMS}", "float32 [3, 4]")
    FLOATS = "float32, bfloat16, float16 or float64"
    refuse(OP, "int_query", lambda: {"query": tokens(3, 4, 16).int()}, f"query must be {FLOATS}", "int32 [3, 4, 16]")
    refuse(OP, "float_key", lambda: {"query": tokens(3, 4, 16).half()}, "key must be float16 like query", "float32")
    refuse(OP, "half_value", lambda: {"value": tokens(5, 2, 8).half()}, "value must be float32 like query", "float16")
    refuse(OP, "key_dim", lambda: {"key": tokens(5, 2, 8)}, "key must", "head_dim 16 like query", "float32 [5, 2, 8]")
    refuse(OP, "value_tokens", lambda: {"value": tokens(4, 2, 8)}, "value must be [5, 2, head_dim_v]", "[4, 2, 8]")
    refuse(OP, "value_heads", lambda: {"value": tokens(5, 1, 8)}, "value must be [5, 2, head_dim_v]", "[5, 1, 8]")
    refuse(OP, "no_query_head", lambda: {"query": tokens(3, 0, 16)}, "query must be", "at least one head", "[3, 0, 16]")
    refuse(OP, "no_key_head", lambda: {"key": tokens(5, 0, 16)}, "key must be", "at least one head", "[5, 0, 16]")
    refuse(OP, "no_element", lambda: {"value": tokens(5, 2, 0)}, "value must be", "one element", "[5, 2, 0]")
    refuse(
        OP,
        "groups",
        lambda: {"key": tokens(5, 3, 16), "value": tokens(5, 3, 8)},
        "heads_q must be a multiple of heads_k",
        "4 query heads and 3 key heads",
    )
    refuse(OP, "sinks_int", lambda: {"sinks": i32(0, 0, 0, 0)}, f"sinks must be {FLOATS}", "int32 [4]")
    refuse(OP, "sinks_short", lambda: {"sinks": torch.zeros(3)}, "sinks must be", "[heads_q] = [4]", "float32 [3]")
    refuse(OP, "softcap_negative", lambda: {"softcap": -1.0}, "softcap must be at least 0", "-1")
    refuse(OP, "softcap_inf", lambda: {"softcap": float("inf")}, "softcap must be", "finite", "inf")
    refuse(OP, "softcap_nan", lambda: {"softcap": float("nan")}, "softcap must be", "nan")
    refuse(OP, "softcap_tiny", lambda: {"softcap": 1e-44}, "softcap must be 0 (no cap) or from 1e-30", "1e-44")
    refuse(OP, "softcap_zero_in_float32", lambda: {"softcap": 1e-50}, "softcap must be 0 (no cap)", "1e-50")
    refuse(OP, "softcap_huge", lambda: {"softcap": 3e38}, "softcap must be 0 (no cap) or from", "to 1e30", "3e+38")
    refuse(OP, "scale_nan", lambda: {"scale": float("nan")}, "scale must be finite", "nan")
    refuse(OP, "scale_inf", lambda: {"scale": -float("inf")}, "scale must be finite", "-inf")
    refuse(OP, "scale_float32", lambda: {"scale": 1e300}, "scale must be finite in float32", "1e+300")
    refuse(OP, "key_on_meta", lambda: {"key": tokens(5, 2, 16).to("meta")}, "key must be on cpu", "[5, 2, 16]")

OP = "attention_backward"
for NAME in ("out", "dout"):
    WANTED = f"{NAME} must be float32 [total_q, heads_q, head_dim_v] = [3, 4, 8]"
    refuse(OP, f"{NAME}_dtype", lambda n=NAME: {n: tokens(3, 4, 8).bfloat16()}, WANTED, "bfloat16 [3, 4, 8]")
    refuse(OP, f"{NAME}_shape", lambda n=NAME: {n: tokens(3, 4, 16)}, WANTED, "float32 [3, 4, 16]")
for NAME in ("lse", "dlse"):
    WANTED = f"{NAME} must be float32 [heads_q, total_q] = [4, 3]"
    refuse(OP, f"{NAME}_dtype", lambda n=NAME: {n: torch.ones(4, 3).half()}, WANTED, "float16 [4, 3]")
    refuse(OP, f"{NAME}_shape", lambda n=NAME: {n: torch.ones(3, 4)}, WANTED, "float32 [3, 4]")
    refuse(
        OP,
        f"{NAME}_of_float64",
        lambda n=NAME: as_float64(VALID["attention_backward"]()) | {n: torch.ones(4, 3)},
        f"{NAME} must be float64 [heads_q, total_q] = [4, 3]",
        "float32 [4, 3]",
    )

OP = "attention"
for NAME, TOTAL in (("cu_seqlens_q", 7), ("cu_seqlens_k", 9)):
    refuse(OP, f"{NAME}_float", lambda n=NAME: {n: torch.zeros(3)}, f"{NAME} must be int32 or int64", "float32 [3]")
    refuse(OP, f"{NAME}_2d", lambda n=NAME: {n: i32(0, 1)[None]}, f"{NAME} must be 1-D", "int32 [1, 2]")
    refuse(OP, f"{NAME}_start", lambda n=NAME: {n: i32(2, 3, 7)}, NAME, "start at 0", f"{NAME}[0] = 2")
    refuse(OP, f"{NAME}_decreasing", lambda n=NAME: {n: i32(0, 4, 3)}, NAME, "decrease", "4", "3")
    refuse(OP, f"{NAME}_past", lambda n=NAME: {n: i32(0, 3, 10)}, NAME, f"total = {TOTAL}", "10")
refuse(OP, "counts", lambda: {"cu_seqlens_q": i32(0, 3)}, "same number of documents", "got 1 and 2")
refuse(OP, "window", lambda: {"window_left": -3}, "window_left must be at least -1", "-3")
refuse(OP, "chunk", lambda: {"chunk_size": -3}, "chunk_size must be at least 0", "-3")
refuse(OP, "softcap", lambda: {"softcap": -3.0}, "softcap must be at least 0", "-3")


# ---- the tests -----------------------------------------------------------------------------------------------------


def functions(op: str) -> list[Any]:
    twin = getattr(reference, op, None)
    return [pytest.param(getattr(torch.ops.packattn, op), id="op")] + (
        [pytest.param(twin, id="reference")] if twin else []
    )


@pytest.mark.parametrize(
    ("function", "case"),
    [pytest.param(f.values[0], case, id=f"{case.op}-{case.name}-{f.id}") for case in CASES for f in functions(case.op)],
)
def test_refusal(function: Any, case: Refusal) -> None:
    arguments = VALID[case.op]() | case.arguments()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function(**arguments)
    message = str(caught.value)
    inner = ("attention_forward: ", "document_ranges: ", "key_ranges: ") if case.op == "attention" else ()
    assert message.startswith((f"{case.op}: ", *inner)), message
    for fact in case.facts:
        assert fact in message, f"{fact!r} is not in {message!r}"
    assert "/" not in message, f"a path in {message!r}"


@pytest.mark.parametrize(
    ("function", "op"), [pytest.param(f.values[0], op, id=f"{op}-{f.id}") for op in VALID for f in functions(op)]
)
def test_the_unchanged_call_is_right(function: Any, op: str) -> None:
    function(**VALID[op]())


def test_every_op_has_refusals() -> None:
    named = {name for name in ops.SCHEMAS if not name.endswith("_reference")}
    assert named == set(VALID) == {case.op for case in CASES}


@pytest.mark.parametrize("op", VALID)
def test_every_tensor_argument_has_a_refusal(op: str) -> None:
    """An op that checks one dtype less than it reads would read out of bounds."""
    schema = getattr(torch.ops.packattn, op).default._schema
    wanted = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
    if op == "attention":  # the others are checked by attention_forward, which it calls
        wanted = {"cu_seqlens_q", "cu_seqlens_k"}
    changed = {name for case in CASES if case.op == op for name in case.arguments()}
    assert wanted <= changed


@pytest.mark.skipif(not packattn._library.CPU.loaded, reason="the compiled library is not in use")
def test_a_compiled_op_throws_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        torch.ops.packattn.cu_seqlens_from_lengths(torch.ones(2))


def test_rows_that_see_nothing_may_hold_anything() -> None:
    begin, end = i32(-7, 0, 2**31 - 1, 1, 9), i32(-9, 2, -(2**31), 3, 9)
    first, last = torch.ops.packattn.query_ranges(begin, end, 3)
    assert first.tolist() == [1, 1, 3] and last.tolist() == [2, 4, 4]
    q, kv = tokens(5, 1, 8), tokens(3, 1, 8)
    out, lse = torch.ops.packattn.attention_forward(q, kv, kv, begin, end, None, 1.0, 0.0)
    assert out[:, 0, 0].tolist() == pytest.approx([0, 1, 0, 1, 0], abs=1e-5)
    assert torch.isneginf(lse[0]).tolist() == [True, False, True, False, True]
