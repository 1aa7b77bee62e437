"""Bits: a document alone and packed, threads, runs, poisoned memory; NaN and Inf stay where they are."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from cases import BFLOAT16, BY_NAME, CASES, FLOAT16, FLOAT32, SUBSET, Case, id_of
from helpers import Inputs, assert_same_bits, inputs, inputs_of_document, of_document, relaid, run
from worker import digests, in_subprocess

import packattn

pytestmark = pytest.mark.usefixtures("native")

LENGTHS = (1, 70, 0, 3, 129, 300, 2, 17, 1030, 64)
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": (37, 0)},
    "window_bidirectional": {"window": (20, 11), "causal": False},
    "chunk": {"chunk": 48},
    "prefix": {"prefix": (0, 30, 0, 1, 129, 5, 1, 9, 400, 20)},
}
HEADS_AND_DIMS = {
    "64": {"dims": (64, 64)},
    "128": {"dims": (128, 128), "heads": (2, 1)},
    "40": {"dims": (40, 40)},
    "gqa": {"dims": (64, 64), "heads": (4, 2)},
}
EXTRAS = {
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "sinks_softcap_gqa": {"sinks": True, "softcap": 3.0, "heads": (4, 1)},
    "192_128": {"dims": (192, 128)},
    "padding": {"q": (-5, 1, 70, -3, 129, -1, 300, 17, -40)},
    "cross": {"q": (5, 40, 129, 1, 64), "k": (70, 3, 300, 129, 0)},
    "many_short": {"q": (8, 7, 1, 16, 3, 9) * 12, "dims": (64, 64), "heads": (8, 8)},
}
BASE = Case("bits", LENGTHS, dims=(64, 64))
BITS = [replace(BASE, name=f"{m}-{h}", **MASKS[m], **HEADS_AND_DIMS[h]) for m in MASKS for h in HEADS_AND_DIMS]
BITS += [replace(BASE, name=name, **extra) for name, extra in EXTRAS.items()]
BITS += [
    replace(BASE, name=f"{n}_window", window=(37, 0), **EXTRAS[n]) for n in ("sinks_softcap_gqa", "padding", "cross")
]


def alone(case: Case, n: int, x: Inputs) -> dict[str, torch.Tensor]:
    results = run(case.alone(n), inputs_of_document(case, n, x))
    results.pop("dsinks", None)  # a sum over all documents
    return results


# float16 takes the code of bfloat16 but for the conversion
HALF = ("causal-64", "sinks_softcap_gqa", "window-40")
BITS_DTYPES = [(c, d) for c in BITS for d in (FLOAT32, BFLOAT16, FLOAT16) if d != FLOAT16 or c.name in HALF]


@pytest.mark.parametrize(("case", "dtype"), BITS_DTYPES, ids=id_of)
def test_packed_is_alone(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    packed = run(case, x)
    seen = {(d.q_length, d.k_length): n for n, d in enumerate(case.documents)}  # one of each shape
    for n in seen.values():
        assert_same_bits(of_document(case, n, packed), alone(case, n, x), f"document {n} alone and packed")


@pytest.mark.parametrize("case", [c for c in SUBSET if c.total_q < 700], ids=id_of)
def test_cases_of_the_table_packed_is_alone(case: Case) -> None:
    x = inputs(case, FLOAT32)
    packed = run(case, x)
    for n in range(len(case.documents)):
        assert_same_bits(of_document(case, n, packed), alone(case, n, x), f"document {n} alone and packed")


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
def test_place_and_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    """The same document at many offsets, among other neighbours, in totals that are odd."""
    one = Case("one", (150,), dims=(64, 64), heads=(4, 2))
    x = inputs(one, dtype)
    expected = run(one, x)
    for before, after in (((3,), ()), ((64, 0, 1), (700,)), ((-7, 129), (-1, 5)), ((1,) * 33, (8,) * 40)):
        case = replace(one, q=(*before, 150, *after))
        y = inputs(case, dtype, seed=1)
        y = replace(y, q=relaid(y.q), k=relaid(y.k), v=relaid(y.v), dout=relaid(y.dout))
        n = sum(m >= 0 for m in before)
        part = inputs_of_document(case, n, y)
        for name in ("q", "k", "v", "dout", "dlse"):
            getattr(part, name).copy_(getattr(x, name))
        assert_same_bits(of_document(case, n, run(case, y)), expected, f"after {before}, before {after}")


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
@pytest.mark.parametrize("case", [*SUBSET, BY_NAME["long_documents"], BY_NAME["reported_odd_tail_1025"]], ids=id_of)
def test_threads_and_runs_change_no_bit(case: Case, dtype: torch.dtype, threads: None) -> None:
    x = inputs(case, dtype)
    torch.set_num_threads(1)
    expected = run(case, x)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for _ in range(2):
            assert_same_bits(run(case, x), expected, f"{count} threads")


@pytest.mark.parametrize("dims", ((64, 64), (40, 48), (64, 24)), ids=str)
def test_large_outputs_are_stored_past_the_caches(dims: tuple[int, int]) -> None:
    """Outputs of 16 MiB and more take stores of their own where rows are whole lines (Dv = 24: they are not)."""
    heads = 4096 // dims[1]
    long = (9, 150, -3, 16, 1, 40)
    rest = -(-(2**22) // (heads * dims[1])) - sum(map(abs, long))
    case = Case("large", (*long, *(8,) * (rest // 8 + 1), -2), dims=dims, heads=(heads, heads))
    assert case.total_q * heads * dims[1] * 4 >= 2**24
    x = inputs(case, FLOAT32)
    packed = run(case, x)
    for n in (*range(6), len(case.documents) - 1):
        assert_same_bits(of_document(case, n, packed), alone(case, n, x), f"document {n} of a large output and alone")
    assert not packed["out"][-2:].any()


# ---------------------------------------------------------------------------------------------------- NaN and Inf

ISOLATION = [
    replace(BASE, name=name, q=(5, 70, 33, -2, 129, 8), **extra)
    for name, extra in {
        "causal": {},
        "bidirectional": {"causal": False},
        "window": {"window": (9, 0)},
        "window_bidirectional": {"window": (20, 11), "causal": False},
        "chunk": {"chunk": 16},
        "prefix": {"prefix": (3, 60, 0, 5, 1)},
        "gqa_40": {"heads": (4, 2), "dims": (40, 40)},
        "128": {"dims": (128, 128), "causal": False},
        "sinks_softcap": {"sinks": True, "softcap": 3.0},
    }.items()
]
ISOLATION += [replace(ISOLATION[0], name="cross", k=(9, 3, 140, -1, 65, 30), causal=False)]
ISOLATION += [replace(ISOLATION[0], name="short", q=(8, 8, 3, 8, 1, 16, 8) * 3)]


def poison(case: Case, x: Inputs, name: str, span: tuple[int, int], value: float) -> Inputs:
    """x with rows [start, stop) of one tensor filled."""
    t = relaid(getattr(x, name))
    (t if name != "dlse" else t.t())[span[0] : span[1]] = value
    return replace(x, **{name: t})


def poison_padding(case: Case, x: Inputs, value: float) -> Inputs:
    """The inputs with `value` in every row of no document."""
    inside = torch.zeros(case.total_q, dtype=torch.bool)
    for d in case.documents:
        inside[d.q_start : d.q_start + d.q_length] = True
    for name in ("q", "k", "v", "dout", "dlse"):
        t = relaid(getattr(x, name))
        (t if name != "dlse" else t.t())[~inside] = value
        x = replace(x, **{name: t})
    return x


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, 3.0e38), ids=str)
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
@pytest.mark.parametrize("case", ISOLATION, ids=id_of)
def test_nan_and_inf_stay_in_their_document(case: Case, dtype: torch.dtype, value: float) -> None:
    x = inputs(case, dtype)
    clean = run(case, x)
    parts = [of_document(case, n, clean) for n in range(len(case.documents))]
    for n, d in enumerate(case.documents[:6]):
        if n % 2 and not math.isnan(value):  # NaN everywhere, the others at every second document
            continue
        y = x
        for name in ("q", "k", "v", "dout", "dlse"):
            start, length = (d.k_start, d.k_length) if name in "kv" else (d.q_start, d.q_length)
            y = poison(case, y, name, (start, start + length), value)
        dirty = run(case, y)
        for m in range(len(case.documents)):
            if m != n:
                assert_same_bits(of_document(case, m, dirty), parts[m], f"document {m} with {value} in document {n}")


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "dlse"))
@pytest.mark.parametrize("case", ISOLATION[:3], ids=id_of)
def test_nan_in_one_tensor_stays_in_its_document(case: Case, name: str) -> None:
    x = inputs(case, FLOAT32)
    clean = run(case, x)
    d = case.documents[1]
    dirty = run(case, poison(case, x, name, (d.q_start, d.q_start + d.q_length), math.nan))
    assert any(torch.isnan(t).any() for t in of_document(case, 1, dirty).values()), "the NaN must show where it is"
    for m in (0, 2, 3, 4):
        assert_same_bits(of_document(case, m, dirty), of_document(case, m, clean), f"document {m}")


@pytest.mark.parametrize("value", (math.nan, math.inf), ids=str)
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
def test_nan_in_padding_goes_nowhere(dtype: torch.dtype, value: float) -> None:
    """Padding holds anything: its own results are 0 and -inf, and no other bit changes."""
    case = replace(BY_NAME["padding_everywhere"], sinks=True)
    x = inputs(case, dtype)
    assert_same_bits(run(case, poison_padding(case, x, value)), run(case, x), "padding")


def test_replaced_document_changes_no_bit_of_the_other() -> None:
    case = Case("two", (50, 40), dims=(64, 64))
    x, other = inputs(case, FLOAT32), inputs(case, FLOAT32, seed=1)
    mixed = replace(x)
    for name in ("q", "k", "v", "dout"):
        t = relaid(getattr(x, name))
        t[:50] = getattr(other, name)[:50]
        mixed = replace(mixed, **{name: t})
    got, expected = run(case, mixed), run(case, x)
    assert_same_bits(of_document(case, 1, got), of_document(case, 1, expected), "document 1")
    assert not torch.equal(got["out"][:50], expected["out"][:50])


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=id_of)
@pytest.mark.parametrize("name", ("q", "k", "v"))
def test_future_of_its_own_document_is_not_seen(name: str, dtype: torch.dtype) -> None:
    """Causal: what stands after a row changes no bit of its out; of NaN, too, nothing arrives as 0 x NaN."""
    case = Case("causal", (200,), dims=(64, 64))
    x = inputs(case, dtype)
    expected = run(case, x)
    for value in (7.0, math.nan):
        got = run(case, poison(case, x, name, (131, 200), value))
        assert torch.equal(got["out"][:131], expected["out"][:131])
        assert torch.equal(got["lse"][:, :131], expected["lse"][:, :131])


# ---------------------------------------------------------------------------------------------------- re-entrancy


def test_two_threads_at_once() -> None:
    jobs = [(case, dtype) for case in (SUBSET[4], SUBSET[6], SUBSET[13]) for dtype in (FLOAT32, BFLOAT16)]
    prepared = [(case, inputs(case, dtype)) for case, dtype in jobs]
    expected = [run(case, x) for case, x in prepared]
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def work(first: int) -> None:
        try:
            start.wait()
            for i in range(2 * len(jobs)):
                n = (first + i) % len(jobs)
                assert_same_bits(run(*prepared[n]), expected[n], f"{jobs[n]} beside another thread")
        except Exception as error:  # noqa: BLE001  (a failure in a thread has to reach the test)
            errors.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors[0]


class Attending(torch.utils.data.Dataset):
    """An item is the result of attention, computed wherever the item is made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return run(SUBSET[4], inputs(SUBSET[4], FLOAT32, seed=n))


@pytest.mark.parametrize("start", ("fork", "spawn"))
def test_inside_dataloader_workers(start: str) -> None:
    data = Attending()
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=120
    )
    for n, item in enumerate(loader):
        assert_same_bits(item, data[n], f"item {n} from a worker")


def test_inside_autograd_threads() -> None:
    """Backward passes from two Python threads at once, and a forward and backward inside a backward (checkpointing)."""
    from torch.utils.checkpoint import checkpoint

    case = SUBSET[4]
    x = inputs(case, FLOAT32)
    x.dlse = torch.zeros_like(x.dlse)
    expected = run(case, x)
    packing = case.packing()
    results: list[dict[str, torch.Tensor]] = []

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return packattn.attention(*qkv, packing, **case.options())

    def work() -> None:
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        checkpoint(attend, q, k, v, use_reentrant=True).backward(x.dout)
        results.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 2
    for result in results:
        assert_same_bits(result, {name: expected[name] for name in result}, "a backward beside another")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inside_another_parallel_region(threads: None) -> None:
    """As a task of torch's own pool (torch.jit.fork): no worker may wait for one that has not started."""
    case = SUBSET[6]
    x = inputs(case, FLOAT32)
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    begin, end = case.packing().key_ranges(**case.mask_options())
    expected = torch.ops.packattn.attention_forward(q, k, v, begin, end, None, 0.1, 0.0)
    tasks = [
        torch.jit.fork(torch.ops.packattn.attention_forward, q, k, v, begin, end, None, 0.1, 0.0) for _ in range(4)
    ]
    for task in tasks:
        out, lse = torch.jit.wait(task)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


# ------------------------------------------------------------------------------------- memory and instruction sets


def test_poisoned_malloc_changes_no_bit() -> None:
    """Scratch memory that nobody wrote must not reach a result: glibc fills what malloc returns with a byte."""
    expected = digests()
    for byte in ("1", "170"):  # memory of 0xFE and of 0x55
        got = in_subprocess("digests", MALLOC_PERTURB_=byte, GLIBC_TUNABLES=f"glibc.malloc.perturb={byte}")
        assert got == expected


def test_allocations_are_poisoned() -> None:
    """The fixture of conftest.py reaches the allocations of the compiled library."""
    assert torch.isnan(torch.empty(100)).all()
    q = torch.randn(4, 1, 8)
    begin = torch.zeros(4, dtype=torch.int32)
    got = torch.ops.packattn.attention_forward(q, q, q, begin, begin, None, 1.0, 0.0)
    assert not got[0].any() and torch.isneginf(got[1]).all()


def other_isas() -> list[str]:
    from packattn import _library

    return (
        []
        if _library.extension is None
        else [i for i in _library.extension.cpu_isas() if i != _library.extension.cpu_isa()]
    )


@pytest.mark.parametrize("isa", other_isas())
def test_other_instruction_sets(isa: str) -> None:
    """The law and the packed-is-alone bits with every instruction set that this machine has."""
    report = in_subprocess("check", PACKATTN_CPU_ISA=isa)
    assert report["isa"] == isa and report["cases"] == len(SUBSET) * 2
    assert report["failures"] == []


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(RuntimeError, match="PACKATTN_CPU_ISA"):
        in_subprocess("digests", PACKATTN_CPU_ISA="vax")


def test_every_case_of_the_table_has_two_documents_somewhere() -> None:
    """Guards this file's selections against a table that shrinks."""
    assert sum(len(c.documents) > 1 for c in CASES) > 50 and len(BITS) > 25
