"""The host ops of the CUDA half: metadata against the CPU's, refusals, opcheck, autograd; what is checked, and when."""

from __future__ import annotations

from typing import Any

import emulated_backend
import pytest
import torch
from cases import BFLOAT16, CASES, POSITION_CASES, SEGMENT_CASES, Case, id_of
from helpers import same_bits
from on_device import moved, ops_of
from test_opcheck import NAMES, OP_CASES
from test_ops_refusals import CASES as REFUSALS
from test_ops_refusals import VALID, Refusal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from packattn import ops

VALUES = "PACKATTN_VALIDATE"  # what looks at values, and waits for the device


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(*((x if isinstance(x, (tuple, list)) else (x,)) for x in (got, expected)), strict=True):
        assert same_bits(a.cpu(), b), (a, b)


# ---- metadata --------------------------------------------------------------------------------------------------------

METADATA = [name for name in NAMES if not name.startswith("attention")]
CPU_OPS = {name: getattr(torch.ops.packattn, name) for name in METADATA}


@pytest.mark.parametrize("validate", ("0", "1"))
@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_that_of_the_cpu(name: str, validate: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VALUES, validate)
    for _, arguments in OP_CASES[name]():
        with ops_of(device) as there:
            got = getattr(there, name)(*(moved(a, device) for a in arguments))
        assert_same(got, getattr(torch.ops.packattn, name)(*arguments))


@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=id_of)
def test_ranges_are_those_of_the_cpu(case: Case, device: str) -> None:
    """Through Packing, whose constructors ask the ops of the device."""
    expected = case.packing().key_ranges(case.packing_k(), **case.mask_options())
    with ops_of(device) as there:
        packing, other = moved(case.packing(), device), moved(case.packing_k(), device)
        options = {name: moved(value, device) for name, value in case.mask_options().items()}
        got = packing.key_ranges(other, **options)
        transposed = there.query_ranges(*got, case.total_k)
    assert_same(got, expected)
    assert_same(transposed, torch.ops.packattn.query_ranges(*expected, case.total_k))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=id_of)
@pytest.mark.parametrize("seed", range(4))
def test_random_ids_and_offsets(seed: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    for size in ((700,), (3, 233), (2500,), (5, 1)):
        ids = torch.randint(0, 3, size, generator=generator).to(dtype)
        ids = ids if seed % 2 else ids.flatten().sort().values.view(size)
        positions = torch.randint(0, 4, size, generator=generator).cumsum(-1).remainder(50).to(dtype)
        lengths = torch.randint(0, 60, (size[-1],), generator=generator).to(dtype)
        with ops_of(device) as there:
            for op, arguments in (
                ("cu_seqlens_from_segment_ids", (ids, None)),
                ("cu_seqlens_from_segment_ids", (ids, 1, 4000)),
                ("documents_from_segment_ids", (ids, 1)),
                ("cu_seqlens_from_position_ids", (positions, "step")),
                ("cu_seqlens_from_position_ids", (positions, "zero", 3000)),
                ("cu_seqlens_from_lengths", (lengths,)),
            ):
                assert_same(getattr(there, op)(*(moved(a, device) for a in arguments)), CPU_OPS[op](*arguments))


@pytest.mark.parametrize("table", ("positions", "segments"))
def test_more_segments_than_room(table: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at values, the segments past the capacity are left out: their tokens see nothing. On request, an error."""
    name = "cu_seqlens_from_position_ids" if table == "positions" else "documents_from_segment_ids"
    cases = POSITION_CASES if table == "positions" else SEGMENT_CASES
    ids = moved(torch.tensor(next(iter(cases.values()))[0]), device)
    middle = "step" if table == "positions" else None
    with ops_of(device) as there:
        got = getattr(there, name)(ids, middle, 1)
        first = got if table == "positions" else torch.stack([got[0][0], got[1][0]])
        whole = getattr(there, name)(ids, middle, None)
        expected = whole[:2] if table == "positions" else torch.stack([whole[0][0], whole[1][0]])
        assert first.tolist() == expected.tolist()
        monkeypatch.setenv(VALUES, "1")
        with pytest.raises(RuntimeError, match=f"{name}: max_segments must be at least the number of segments"):
            getattr(there, name)(ids, middle, 1)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFUSALS, ids=lambda r: f"{r.op}-{r.name}")
def test_refusals_on_device(case: Refusal, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's, word for word but for the device; those about values on request."""
    monkeypatch.setenv(VALUES, "1")
    arguments = {name: moved(value, device) for name, value in (VALID[case.op]() | case.arguments()).items()}
    with ops_of(device) as there, pytest.raises((RuntimeError, ValueError)) as caught:
        getattr(there, case.op)(**arguments)
    message = str(caught.value)
    facts = [fact.replace("on cpu", f"on {'cuda' if device == 'cuda' else 'cpu'}") for fact in case.facts]
    assert case.op in message or case.op == "attention"
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize("name", sorted(VALID))
def test_valid_calls_on_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for validate in ("0", "1"):
        monkeypatch.setenv(VALUES, validate)
        with ops_of(device) as there:
            getattr(there, name)(**{k: moved(v, device) for k, v in VALID[name]().items()})


@pytest.mark.parametrize("validate", ("0", "1"))
def test_values_are_looked_at_on_request(validate: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VALUES, validate)
    q = moved(torch.randn(4, 1, 64).to(BFLOAT16), device)
    begin, end = (moved(torch.tensor(x, dtype=torch.int32), device) for x in ([0, 2, 1, 0], [1, 3, 9, 4]))
    with ops_of(device) as there:
        if validate == "1":
            with pytest.raises(
                RuntimeError, match=r"attention_forward: key_begin .* key_begin\[2\] = 1 after 2|key_end"
            ):
                there.attention_forward(q, q, q, begin, end, None, 1.0, 0.0)
        else:
            there.attention_forward(q, q, q, begin, end, None, 1.0, 0.0)


@pytest.mark.parametrize("op", ("attention_forward", "key_ranges", "query_ranges"))
def test_devices_are_not_mixed(op: str, device: str) -> None:
    """Torch's own device checks do not reach these ops."""
    arguments = VALID[op]()
    if device == "emulated":
        last = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)][-1]
        arguments[last] = arguments[last].to("meta")
        wanted = "on cpu"
    else:
        first = next(iter(arguments))
        arguments[first] = arguments[first].cuda()
        wanted = "on cuda"
    with ops_of(device) as there, pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        getattr(there, op)(**arguments)
    assert wanted in str(caught.value) or isinstance(caught.value, NotImplementedError)


# ---- torch.library ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_reference")])
def test_opcheck_on_device(name: str, device: str) -> None:
    for what, arguments in OP_CASES[name]():
        there = tuple(
            moved(a, device).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        with ops_of(device) as namespace:
            try:
                torch.library.opcheck(getattr(namespace, name).default, there)
            except Exception as error:
                raise AssertionError(f"opcheck of {name} on {what}: {error}") from error


@pytest.mark.parametrize("name", ("attention_forward", "attention_backward"))
def test_opcheck_of_16_bits(name: str, device: str) -> None:
    """The tensor-core kernels."""
    for what, arguments in OP_CASES[name]():
        if not any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 and a.dim() == 3 for a in arguments):
            continue
        there = [
            moved(a.detach().to(BFLOAT16) if a.dim() == 3 else a, device) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        if name == "attention_forward":
            there[:3] = [t.requires_grad_() for t in there[:3]]
        with ops_of(device) as namespace:
            try:
                torch.library.opcheck(getattr(namespace, name).default, tuple(there))
            except Exception as error:
                raise AssertionError(f"opcheck of {name} on {what}: {error}") from error


def test_the_other_namespace_has_the_same_schemas(emulator: None) -> None:
    there = getattr(torch.ops, emulated_backend.NAMESPACE)
    for name in ops.SCHEMAS:
        schema = str(getattr(there, name).default._schema)
        assert schema == str(getattr(torch.ops.packattn, name).default._schema).replace(
            "packattn::", f"{emulated_backend.NAMESPACE}::"
        )
        kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"{emulated_backend.NAMESPACE}::{name}", "CPU")
        assert kernel == (name != "attention" and not name.endswith("_reference"))


def test_a_report_of_the_emulator_is_an_error(emulator: None) -> None:
    """A kernel that reads shared memory which nobody wrote, launched as the ops launch theirs."""
    text = emulated_backend.broken_launch()
    assert text.startswith("emulator: ") and "uninitialised" in text and "control.cpp" in text


def test_an_unknown_gpu_is_refused(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKATTN_EMULATED_CAPABILITY", "81")
    with ops_of("emulated") as there, pytest.raises(RuntimeError, match="PACKATTN_EMULATED_CAPABILITY must be 75"):
        there.attention_forward(**VALID["attention_forward"]())


# ---- graphs, for which no device is needed ---------------------------------------------------------------------------


def traced(device_type: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The ops of a forward and backward over tensors that only say where they would be, and what comes out."""

    def step(q: Any, k: Any, v: Any, starts: Any, ends: Any) -> tuple[Any, ...]:
        ops = torch.ops.packattn
        begin, end, diagonal, _ = ops.document_ranges(starts, ends, starts, ends, 9)
        key_begin, key_end = ops.key_ranges(begin, end, diagonal, None, True, -1, -1, 0)
        out, lse = ops.attention_forward(q, k, v, key_begin, key_end, None, 0.125, 0.0)
        grads = ops.attention_backward(out, lse, q, k, v, out, lse, key_begin, key_end, None, 0.125, 0.0)
        return out, lse, *grads, ops.position_ids_from_cu_seqlens(starts, 9)

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(9, heads, 64, device=device_type, dtype=BFLOAT16) for heads in (4, 2, 2)]
        tensors += [torch.empty(3, device=device_type, dtype=torch.int32) for _ in range(2)]
        graph = make_fx(step)(*tensors)
        results = step(*tensors)
    assert {t.device.type for t in results} == {device_type}
    targets = [f"{node.target} {node.args}" for node in graph.graph.nodes if node.op == "call_function"]
    return targets, [(t.dtype, t.shape, t.stride()) for t in results]


def test_the_graph_on_cuda_is_that_on_the_cpu() -> None:
    on_cpu, on_cuda = traced("cpu"), traced("cuda")
    assert on_cpu == on_cuda
    assert any("packattn.attention_backward.default" in target for target in on_cuda[0])
