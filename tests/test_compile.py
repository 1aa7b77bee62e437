"""torch.compile(fullgraph=True): one frame for many batches, forward and backward; Packing inside and as an argument."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import BFLOAT16, BY_NAME, FLOAT32, FLOAT64, id_of
from helpers import assert_same_bits, inputs, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

import packattn
from packattn import Packing

TOTAL = 96


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batches(count: int, total: int = TOTAL, seed: int = 0) -> list[list[int]]:
    """Lengths of `count` batches, every one with another number of documents; 1 and `total` documents among them."""
    rng = random.Random(seed)
    result = []
    for documents in [1, 2, total, *range(3, count)][:count]:
        cuts = sorted(rng.sample(range(1, total), documents - 1))
        result.append([b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)])
    assert len({len(lengths) for lengths in result}) == count
    return result


def tensors(total: int = TOTAL, dtype: torch.dtype = FLOAT32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, h, 16, generator=generator).to(dtype).requires_grad_() for h in (4, 2, 2)]


def results(function: Callable[..., torch.Tensor], qkv: list[torch.Tensor], *args: Any) -> dict[str, torch.Tensor]:
    out = function(*qkv, *args)
    grads = torch.autograd.grad(out.square().sum(), qkv)
    return {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def assert_one_frame(
    function: Callable[..., torch.Tensor], arguments: list[tuple[Any, ...]], backend: str = "aot_eager", **options: Any
) -> None:
    """Every batch: the bits of eager, forward and backward, and one compilation in all."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for n, args in enumerate(arguments):
        qkv = tensors(args[-1] if isinstance(args[-1], int) else TOTAL, seed=n)
        args = args[:-1] if isinstance(args[-1], int) else args
        expected = results(function, qkv, *args)
        assert_same_bits(results(compiled, qkv, *args), expected, f"batch {n}")
        assert counter.frame_count == 1, f"batch {n} compiled again"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    return packattn.attention(q * 1.5, k, v, packing)


def attend_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    return packattn.attention(q, k, v, packing, causal=False, window_size=(5, 3), softcap=4.0)


def attend_positions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    packing = Packing.from_position_ids(position_ids)
    return packattn.attention(q, k, v, packing) * (1 + packing.position_ids)[:, None, None]


def attend_positions_capacity(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    return packattn.attention(q, k, v, Packing.from_position_ids(position_ids, max_segments=TOTAL))


def attend_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    return packattn.attention(q, k, v, Packing.from_segment_ids(segment_ids, pad_id=0))


def attend_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    out, lse = torch.ops.packattn.attention(q, k, v, cu_seqlens)
    return out + lse.t()[..., None].exp()


def capacity(lengths: list[int], room: int = TOTAL) -> torch.Tensor:
    """cu_seqlens of a fixed size."""
    cu = Packing.from_lengths(lengths).cu_seqlens
    return torch.cat([cu, cu[-1:].expand(room + 1 - cu.numel())])


@pytest.mark.parametrize("dynamic", (None, False, True))
@pytest.mark.parametrize("function", (attend, attend_window))
def test_packing_as_an_argument(function: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    """The documents are counted in the shapes of a Packing made from lengths; attention must not look at them."""
    arguments = [(Packing.from_lengths(lengths),) for lengths in batches(20)]
    assert_one_frame(function, arguments, dynamic=dynamic)


def test_packing_with_room_as_an_argument() -> None:
    arguments = [(Packing.from_cu_seqlens(capacity(lengths), TOTAL),) for lengths in batches(20)]
    assert_one_frame(attend, arguments)
    assert_one_frame(attend_window, arguments)


def test_packing_from_positions_with_room_as_an_argument() -> None:
    arguments = [
        (Packing.from_position_ids(Packing.from_lengths(lengths).position_ids, max_segments=TOTAL),)
        for lengths in batches(20)
    ]
    assert_one_frame(attend, arguments)


@pytest.mark.parametrize("function", (attend_positions, attend_positions_capacity), ids=("", "room"))
def test_packing_made_inside_from_position_ids(function: Callable[..., torch.Tensor]) -> None:
    arguments = [(Packing.from_lengths(lengths).position_ids,) for lengths in batches(20)]
    assert_one_frame(function, arguments)


def test_packing_made_inside_from_segment_ids() -> None:
    rng = random.Random(0)
    arguments = []
    for lengths in batches(20):
        ids = Packing.from_lengths(lengths).segment_ids + 1
        ids[TOTAL - rng.randint(0, 4) :] = 0
        arguments.append((ids,))
    assert_one_frame(attend_segments, arguments)


def test_composite_op_with_cu_seqlens() -> None:
    assert_one_frame(attend_op, [(capacity(lengths),) for lengths in batches(20)])


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (attend, lambda lengths: Packing.from_lengths(lengths)),
        (attend_positions, lambda lengths: Packing.from_lengths(lengths).position_ids),
        (attend_op, lambda lengths: Packing.from_lengths(lengths).cu_seqlens),
    ],
    ids=("packing", "positions", "op"),
)
def test_other_totals_with_dynamic_shapes(function: Callable[..., torch.Tensor], make: Callable[..., Any]) -> None:
    totals = (96, 33, 70, 128, 17, 96, 51)
    rng = random.Random(1)
    arguments = []
    for total in totals:
        # One document is another matter: torch compiles sizes of 1 apart from all others, with any op.
        lengths = batches(7, total, seed=total)[rng.randint(1, 6)]
        arguments.append((make(lengths), total))
    assert_one_frame(function, arguments, dynamic=True)


def test_inductor() -> None:
    """The default backend, forward and backward, over batches, in one frame."""
    arguments = [(Packing.from_lengths(lengths).position_ids,) for lengths in batches(4)]
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend_positions, fullgraph=True, backend=counter)
    for n, args in enumerate(arguments):
        qkv = tensors(seed=n)
        expected, got = results(attend_positions, qkv, *args), results(compiled, qkv, *args)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name])
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT64), ids=id_of)
def test_other_dtypes(dtype: torch.dtype) -> None:
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    packing = Packing.from_lengths([40, 56])
    qkv = tensors(dtype=dtype)
    assert_same_bits(results(compiled, qkv, packing), results(attend, qkv, packing), str(dtype))


@pytest.mark.parametrize("name", ("cross_k_shorter", "sinks_softcap_window", "prefix", "chunk_4", "layout_strided_dim"))
def test_every_feature_compiles(name: str) -> None:
    case = BY_NAME[name]
    x = inputs(case, FLOAT32)
    packing, options = case.packing(), case.options()

    def function(q, k, v, sinks, packing, packing_k, prefix_lengths, plain):
        if packing_k is not None:
            plain = plain | {"packing_k": packing_k}
        if prefix_lengths is not None:
            plain = plain | {"prefix_lengths": prefix_lengths}
        return packattn.attention(q, k, v, packing, sinks=sinks, return_lse=True, **plain)

    packing_k, prefix_lengths = options.pop("packing_k"), options.pop("prefix_lengths", None)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    gradients = []
    for f in (function, compiled):
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        sinks = None if x.sinks is None else x.sinks.detach().requires_grad_()
        out, lse = f(q, k, v, sinks, packing, packing_k, prefix_lengths, options)
        wanted = [q, k, v] + ([] if sinks is None else [sinks])
        gradients.append([out, lse, *torch.autograd.grad([out, lse], wanted, [x.dout, x.dlse])])
    for a, b in zip(*gradients, strict=True):
        assert same_bits(a, b)


def test_fake_tensors_say_the_shapes() -> None:
    """Shape, dtype and strides of the fakes, with nothing computed."""
    from torch._subclasses import FakeTensorMode

    for name in ("gqa_9_3", "dim_192_128", "layout_transposed", "cross_k_shorter", "no_tokens"):
        case = BY_NAME[name]
        x = inputs(case, BFLOAT16)
        begin, end = case.packing().key_ranges(case.packing_k(), **case.mask_options())
        real = torch.ops.packattn.attention_forward(x.q, x.k, x.v, begin, end, x.sinks, 1.0, 0.0)
        with FakeTensorMode() as mode:
            fake = torch.ops.packattn.attention_forward(
                *(mode.from_tensor(t) for t in (x.q, x.k, x.v, begin, end)),
                None if x.sinks is None else mode.from_tensor(x.sinks),
                1.0,
                0.0,
            )
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


def test_compiling_brings_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        compiled(*tensors(), Packing.from_lengths([40, 56])).sum().backward()
    assert not [w for w in caught if "packattn" in str(w.message)]


def test_refusals_inside_a_compiled_function() -> None:
    """Wrong shapes are refused while tracing, with the same words."""
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = tensors()
    with pytest.raises(Exception, match="96|multiple"):
        compiled(q, k[:, :1].expand(96, 3, 16), v[:, :1].expand(96, 3, 16), Packing.from_lengths([40, 56]))
    with pytest.raises(Exception, match="total"):
        compiled(q, k, v, Packing.from_lengths([40, 55]))
