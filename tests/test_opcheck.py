"""torch.library.opcheck for every op of torch.ops.packattn; an op without a case here is a failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT32, FLOAT64, POSITION_CASES, SEGMENT_CASES, Case
from helpers import inputs

import packattn

ops = torch.ops.packattn
NAMES = sorted(
    name.removeprefix("packattn::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("packattn::")
)

ATTENTION = (
    "three_documents",
    "reported_zero_length_documents",
    "only_zero_length_documents_and_padding",
    "no_tokens",
    "padding_between",
    "gqa_9_3",
    "dim_24",
    "dim_72_80",
    "reported_cross_gqa",
    "cross_k_without_tokens",
    "cross_padding",
    "window_both",
    "sinks_softcap_window",
    "layout_strided_dim",
    "layout_expanded_rows",
)
# opcheck's own copy of a tensor without elements needs plain strides.
CONTIGUOUS = ("no_tokens",)
SMALL_WINDOWS = {"window_both": (30, 9), "sinks_softcap_window": (30, 9, -1)}


def attention_cases() -> Iterator[tuple[str, Case, torch.dtype]]:
    for name in ATTENTION:
        case = BY_NAME[name]
        case = replace(
            case, q=SMALL_WINDOWS.get(name, case.q), layout="contiguous" if name in CONTIGUOUS else case.layout
        )
        yield f"{name}-float32", case, FLOAT32
        if name in ("three_documents", "sinks_softcap_window", "cross_padding"):
            yield f"{name}-bfloat16", case, BFLOAT16
            yield f"{name}-float64", case, FLOAT64
    yield "dim_12_falls_back-float32", BY_NAME["dim_12_falls_back"], FLOAT32


def forward_arguments(case: Case, dtype: torch.dtype, grad: bool = True) -> tuple[Any, ...]:
    x = inputs(case, dtype)
    begin, end = case.packing().key_ranges(case.packing_k(), **case.mask_options())
    q, k, v = (t.detach().requires_grad_(grad) for t in (x.q, x.k, x.v))
    sinks = None if x.sinks is None else x.sinks.detach().requires_grad_(grad)
    return q, k, v, begin, end, sinks, 1 / math.sqrt(case.dims[0]), case.softcap


def of_forward() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, case, dtype in attention_cases():
        yield name, forward_arguments(case, dtype)
    arguments = list(forward_arguments(BY_NAME["three_documents"], FLOAT32))
    arguments[1] = arguments[1].detach()
    yield "k_without_gradient", tuple(arguments)


def of_backward() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, case, dtype in attention_cases():
        arguments = forward_arguments(case, dtype, grad=False)
        out, lse = ops.attention_forward(*arguments)
        x = inputs(case, dtype, dout="contiguous" if case.total_q == 0 else "sliced")
        q, k, v, *rest = arguments
        yield name, (x.dout, x.dlse.to(lse.dtype), q, k, v, out, lse, *rest)
        yield f"{name}-expanded", (torch.ones((), dtype=dtype).expand(out.shape), None, q, k, v, out, lse, *rest)


def of_attention() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in (FLOAT32, BFLOAT16, FLOAT64):
        q, k, v = (torch.randn(9, h, 16, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
        cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
        other = torch.tensor([0, 2, 5, 9])
        sinks = torch.randn(4, requires_grad=True)
        yield f"{dtype}", (q, k, v, cu)
        yield f"{dtype}-all", (q, k, v, cu, other, False, 3, 2, 0.3, 4.0, sinks, 0)
        yield f"{dtype}-chunk", (q, k, v, cu, None, True, -1, -1, None, 0.0, None, 2)


def of_ids(table: dict[str, Any]) -> Callable[[], Iterator[tuple[str, tuple[Any, ...]]]]:
    def cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name, (ids, keywords, *_) in table.items():
            room = keywords.get("max_segments")
            middle = keywords.get("rule", "step") if table is POSITION_CASES else keywords.get("pad_id")
            yield name, (torch.tensor(ids, dtype=torch.int64), middle, room)
            if name.startswith("reported"):
                yield f"{name}-int32", (torch.tensor(ids, dtype=torch.int32), middle, 12)

    return cases


def of_cu_seqlens() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in (torch.int32, torch.int64):
        yield f"{dtype}", (torch.tensor([0, 3, 3, 5], dtype=dtype), 5)
        yield f"{dtype}-tail", (torch.tensor([0, 3, 3, 5], dtype=dtype), 8)
        yield f"{dtype}-strided", (torch.tensor([0, 9, 3, 9, 5], dtype=dtype)[::2], 8)
        yield f"{dtype}-nothing", (torch.tensor([0], dtype=dtype), 0)


def of_lengths() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for dtype in (torch.int32, torch.int64):
        for lengths in ([3, 0, 2], [], [[3, 1], [2, 0]]):
            yield f"{dtype}-{lengths}", (torch.tensor(lengths, dtype=dtype),)
    yield "strided", (torch.tensor([[3, 1], [2, 0]])[:, 0],)


def of_document_ranges() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name in ("three_documents", "reported_zero_length_documents", "cross_padding", "no_tokens", "no_documents"):
        case = BY_NAME[name]
        p, other = case.packing(), case.packing_k() or case.packing()
        yield name, (p.starts, p.ends, other.starts, other.ends, case.total_q)


def of_key_ranges() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, arguments in of_document_ranges():
        begin, end, diagonal, _ = ops.document_ranges(*arguments)
        yield name, (begin, end, None, None, True, -1, -1, 0)
        yield f"{name}-all", (begin, end, diagonal, torch.minimum(begin + 2, end), False, 3, 2, 4)


def of_query_ranges() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name in ("three_documents", "reported_zero_length_documents", "cross_padding", "no_tokens", "no_documents"):
        case = BY_NAME[name]
        yield name, (*case.packing().key_ranges(case.packing_k(), **case.mask_options()), case.total_k)


OP_CASES: dict[str, Callable[[], Iterator[tuple[str, tuple[Any, ...]]]]] = {
    "attention": of_attention,
    "attention_forward": of_forward,
    "attention_forward_reference": of_forward,
    "attention_backward": of_backward,
    "attention_backward_reference": of_backward,
    "cu_seqlens_from_lengths": of_lengths,
    "cu_seqlens_from_position_ids": of_ids(POSITION_CASES),
    "cu_seqlens_from_segment_ids": of_ids(SEGMENT_CASES),
    "documents_from_segment_ids": of_ids(SEGMENT_CASES),
    "position_ids_from_cu_seqlens": of_cu_seqlens,
    "segment_ids_from_cu_seqlens": of_cu_seqlens,
    "document_ranges": of_document_ranges,
    "key_ranges": of_key_ranges,
    "query_ranges": of_query_ranges,
}


def test_every_op_has_cases() -> None:
    assert sorted(OP_CASES) == NAMES
    assert sorted(packattn.ops.SCHEMAS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op = getattr(ops, name).default
    count = 0
    for what, arguments in OP_CASES[name]():
        try:
            torch.library.opcheck(op, arguments)
        except Exception as error:
            raise AssertionError(f"opcheck of {name} on {what}: {error}") from error
        count += 1
    assert count >= 3


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_functional_and_named_as_written(name: str) -> None:
    """No op writes to its arguments or aliases them; the schema is the one that ops.py holds."""
    schema = getattr(ops, name).default._schema
    assert not schema.is_mutable
    assert schema == torch._C.parse_schema(f"packattn::{name}{packattn.ops.SCHEMAS[name]}")
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


@pytest.mark.parametrize("name", [n for n in NAMES if n != "attention"])
def test_compiled_library_serves_every_op(name: str, native: None) -> None:
    if name.endswith("_reference"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"packattn::{name}", "CPU")
    else:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"packattn::{name}", "CPU")
