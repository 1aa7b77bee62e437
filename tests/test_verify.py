"""packattn.verify.check_attention and check_positions: right functions pass, and every broken one fails for its reason."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F

import packattn
from packattn import verify
from packattn.verify import LeakError, check_attention, check_positions
from packattn.verify.expected import Formula, expected_mask
from packattn.verify.report import spans_of

LENGTHS = (4, 1, 3)


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of tiny calls: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- functions to check ------------------------------------------------------------------------------------------


def sdpa(q, k, v, mask):
    """SDPA on [T, H, D] under a bool mask [Tq, Tk] or [Hq, Tq, Tk]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def dense(q, k, v, packing, **mask):
    return sdpa(q, k, v, packattn.dense_mask(packing, **mask))


def loop(q, k, v, packing):
    """Every document alone."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for rows in packing.documents():
        if rows.stop > rows.start:
            x, y, z = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
            part = F.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            out = torch.cat([out[: rows.start], part, out[rows.stop :]])
    return out


def plain_causal(q, k, v, packing):
    return sdpa(q, k, v, torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril())


def ranges(packing, begin=0, end=0, **mask):
    """The packing's mask with begin and end of every row moved, as a dense mask."""
    key_begin, key_end = packing.key_ranges(**mask)
    empty = key_begin >= key_end
    j = torch.arange(packing.total)
    seen = (j >= (key_begin + begin)[:, None]) & (j < (key_end + end)[:, None])
    return seen & ~empty[:, None]


def shifted_ranges(begin=0, end=0, **mask):
    return lambda q, k, v, packing: sdpa(q, k, v, ranges(packing, begin, end, **mask))


def leak_in_one_head(q, k, v, packing):
    mask = packattn.dense_mask(packing).expand(q.shape[1], -1, -1).clone()
    mask[2] = ~packing.is_padding[:, None] & ~packing.is_padding
    return sdpa(q, k, v, mask)


def wrong_head_map(q, k, v, packing):
    heads = torch.arange(q.shape[1]) % k.shape[1]
    return dense(q, k[:, heads], v[:, heads], packing)


def wrong_value(q, k, v, packing):
    """Right weights; the values of the document are read one row too far."""
    rows = torch.arange(q.shape[0])
    rows = torch.where(rows + 1 < packing.end, rows + 1, rows)
    return dense(q, k, v[rows], packing)


def zeros(q, k, v, packing):
    return (q * 0).sum() + torch.zeros_like(q)


def wrong_scale(q, k, v, packing):
    return dense(q * 1.01, k, v, packing)


def mean_removed(q, k, v, packing):
    """Attention is right, then the row's mean is taken over all documents."""
    out = dense(q, k, v, packing)
    return out - 0.01 * out.mean(0)


def writes_to_input(q, k, v, packing):
    with torch.no_grad():
        q.mul_(0.5)
    return dense(2 * q, k, v, packing)


def leaks_without_gradients(q, k, v, packing):
    return (dense if torch.is_grad_enabled() else plain_causal)(q, k, v, packing)


def leaks_with_gradients(q, k, v, packing):
    return (plain_causal if torch.is_grad_enabled() else dense)(q, k, v, packing)


class OtherBackward(torch.autograd.Function):
    """The forward of one function, the backward of another."""

    @staticmethod
    def forward(ctx, q, k, v, packing, forward, backward):
        ctx.save_for_backward(q, k, v)
        ctx.packing, ctx.backward_of = packing, backward
        return forward(q, k, v, packing)

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(True) for x in ctx.saved_tensors]
            out = ctx.backward_of(*leaves, ctx.packing)
        return (*torch.autograd.grad(out, leaves, dout), None, None, None)


def other_backward(backward):
    return lambda q, k, v, packing: OtherBackward.apply(q, k, v, packing, dense, backward)


class Tampered(torch.autograd.Function):
    """The identity of q, k, v; `change` is given their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, change):
        ctx.change = change
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return (*ctx.change(dq, dk, dv), None)


def tampered(change):
    return lambda q, k, v, packing: dense(*Tampered.apply(q, k, v, change), packing)


def manual_with_lse(q, k, v, packing, detach_lse=False):
    formula = Formula(packattn.dense_mask(packing), q.shape[2] ** -0.5)
    out, lse = formula(q, k, v)
    # A backward that drops the gradient of lse gives it a graph, but no gradient.
    return out, lse.detach() + 0 * q.sum() if detach_lse else lse


# ---- right functions pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [packattn.attention, dense, loop, manual_with_lse], ids=lambda fn: fn.__name__)
def test_right_functions_pass(fn):
    report = check_attention(fn, LENGTHS)
    report.raise_if_failed()
    assert report.passed and report.leak == 0 and report.leaks == report.blind == 0 and not report.failures()
    assert report.backward == "checked"
    assert torch.equal(report.influence != 0, report.expected)
    assert "attention: passed" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_size": (1, 0)},
        {"window_size": (0, 0)},
        {"causal": False, "window_size": (1, 2)},
        {"chunk_size": 2},
        {"prefix_lengths": (2, 0, 3)},
        {"scale": 0.7},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_mask_and_option_of_packattn(options):
    given = dict(options)
    if "prefix_lengths" in given:
        given["prefix_lengths"] = torch.tensor(given["prefix_lengths"])
    fn = functools.partial(packattn.attention, return_lse=True, **given)
    report = check_attention(fn, LENGTHS, poison=True, **options)
    report.raise_if_failed()
    assert not report.notes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype):
    check_attention(packattn.attention, LENGTHS, dtype=dtype).raise_if_failed()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (2, 2)])
def test_head_counts_and_value_dims(heads):
    check_attention(packattn.attention, (3, 2), heads=heads, head_dim=8, head_dim_v=24).raise_if_failed()


def test_empty_documents_and_other_key_lengths():
    check_attention(packattn.attention, (0, 2, 0, 3, 0), poison=True).raise_if_failed()
    for queries, keys in (((0, 1, 0, 1), (0, 3, 0, 5)), ((4, 2), (2, 3))):
        report = check_attention(packattn.attention, queries, lengths_k=keys, heads=(3, 1))
        report.raise_if_failed()
        assert report.expected.shape == (sum(queries) + 2, sum(keys) + 2)


def test_padding_in_the_middle_of_the_row():
    ids = torch.tensor([[1, 1, 2, 0], [1, 0, 0, 2]])
    packing = packattn.Packing.from_segment_ids(ids, pad_id=0)
    report = check_attention(packattn.attention, packing, poison=True)
    report.raise_if_failed()
    assert report.documents == ((0, 2), (2, 3), (4, 5), (7, 8)) and report.lengths == (2, 1, 1, 1)
    lost = lambda q, k, v, p: sdpa(q, k, v, packattn.dense_mask(p) | (p.is_padding[:, None] & p.is_padding))
    texts = check_attention(lost, packing).failures()
    assert any(text.startswith("padding (row 3) sees padding (row 5): ") for text in texts)
    early = check_attention(shifted_ranges(begin=-1), packing)
    assert "document 3, token 0 (row 7) sees padding (row 6): " in str(early)
    keys = packattn.Packing.from_segment_ids(torch.tensor([5, 0, 0, 6, 6, 7, 8]), pad_id=0)
    check_attention(packattn.attention, packing, lengths_k=keys).raise_if_failed()


def test_a_mask_of_ones_own():
    packing = packattn.Packing.from_lengths([3, 3])
    mask = packattn.dense_mask(packing)
    mask[2, 0] = False
    check_attention(lambda q, k, v, p: sdpa(q, k, v, mask), (3, 3), mask=mask, tail=0).raise_if_failed()
    report = check_attention(dense, (3, 3), mask=mask, tail=0)
    assert "document 0, token 2 (row 2) sees document 0, token 0 (row 0), which the mask hides" in str(report)


def test_expected_mask_is_that_of_the_package():
    """Two ways to write the mask down: token by token, and as ranges."""
    spans = spans_of((4, 0, 1, 5))
    for causal in (True, False):
        for window in ((-1, -1), (0, 0), (2, 1), (1, -1)):
            for chunk in (0, 2, 3):
                for prefix in (None, (1, 0, 0, 9)):
                    options = {"causal": causal, "window_size": window, "chunk_size": chunk}
                    want = expected_mask(spans, spans, 12, 12, prefix_lengths=prefix, **options)
                    packing = packattn.Packing.from_lengths([4, 0, 1, 5], total=12)
                    tensor = None if prefix is None else torch.tensor(prefix)
                    assert torch.equal(packattn.dense_mask(packing, prefix_lengths=tensor, **options), want), options
                keys = packattn.Packing.from_lengths([2, 3, 0, 7], total=12)
                options = {"causal": causal, "window_size": window, "chunk_size": chunk}
                want = expected_mask(spans, spans_of((2, 3, 0, 7)), 12, 12, **options)
                assert torch.equal(packattn.dense_mask(packing, keys, **options), want), options


# ---- broken functions fail, for their reason ---------------------------------------------------------------------


def test_plain_causal_is_named_query_by_key():
    report = check_attention(plain_causal, LENGTHS, tail=0)
    assert not report.passed and report.leak > 0.1
    # Every row sees every key of the documents before its own, and no pair is blind or inside a document.
    wrong = {(f.first, f.second) for f in report.faults if f.relation == "row-key"}
    assert wrong == {(i, j) for i in range(8) for j in range(8) if (j < 4 <= i) or (j < 5 <= i)}
    assert all(f.kind == "leak" and f.across for f in report.faults)
    worst = report.faults[0]
    assert worst.relation == "row-key" and worst.size == max(f.size for f in report.faults if f.relation == "row-key")
    with pytest.raises(
        LeakError, match=r"document 1, token 0 \(row 4\) sees document 0, token \d \(row \d\): \d"
    ) as error:
        report.raise_if_failed()
    assert error.value.report is report and isinstance(error.value, AssertionError)


MUTANTS = {
    # name: (function, options of the check, what the report must say)
    "boundary one key too early": (
        shifted_ranges(begin=-1),
        {},
        "document 1, token 0 (row 4) sees document 0, token 3 (row 3): ",
    ),
    "causal one key too far": (
        shifted_ranges(end=1),
        {},
        "document 0, token 3 (row 3) sees document 1, token 0 (row 4): ",
    ),
    "blind to the first key": (
        shifted_ranges(begin=1),
        {},
        "document 0, token 1 (row 1) does not see document 0, token 0 (row 0)",
    ),
    "blind to itself": (
        shifted_ranges(end=-1),
        {},
        "document 2, token 2 (row 7) does not see document 2, token 2 (row 7)",
    ),
    "window one too wide": (
        shifted_ranges(begin=-1, window_size=(1, 0)),
        {"window_size": (1, 0)},
        "document 0, token 3 (row 3) sees document 0, token 1 (row 1), which the mask hides: ",
    ),
    "window one too narrow": (
        functools.partial(dense, window_size=(1, 0)),
        {"window_size": (2, 0)},
        "document 0, token 3 (row 3) does not see document 0, token 1 (row 1)",
    ),
    "causal where bidirectional is asked": (
        dense,
        {"causal": False},
        "document 0, token 0 (row 0) does not see document 0, token 3 (row 3)",
    ),
    "one head sees everything": (leak_in_one_head, {}, "query head 2, key head 1"),
    "heads mapped by remainder": (wrong_head_map, {}, "query head 1 reads key head 1: "),
    "values one row too far": (
        wrong_value,
        {},
        "document 0, token 2 (row 2) sees document 0, token 3 (row 3), which the mask hides: ",
    ),
    "zeros": (zeros, {}, "does not see"),
    "scale one percent off": (wrong_scale, {}, "away from the float64 result"),
    "mean over all documents": (
        mean_removed,
        {},
        "document 0, token 0 (row 0) depends on document 1, token 0 (row 4): ",
    ),
    "writes into q": (writes_to_input, {}, "fn writes into its argument q"),
    "leaks under no_grad": (leaks_without_gradients, {}, "change of out when the key is replaced"),
    "leaks where a graph is built": (leaks_with_gradients, {}, "gradient of out with respect to the key"),
    "padding gives values": (
        lambda q, k, v, p: sdpa(q, k, v, packattn.dense_mask(p) | (p.is_padding[:, None] & p.is_padding)),
        {},
        "padding (row 8) sees padding (row 9)",
    ),
    "padding rows are not zero": (
        lambda q, k, v, p: dense(q, k, v, p) + p.is_padding[:, None, None],
        {},
        "padding (row 8) sees no key, but its out is not 0: 1 (rows [8, 9])",
    ),
    "documents see padding": (
        lambda q, k, v, p: sdpa(q, k, v, packattn.dense_mask(p) | p.is_padding[:, None].logical_not() & p.is_padding),
        {},
        "document 0, token 0 (row 0) sees padding (row 8): ",
    ),
    "backward ignores documents": (
        other_backward(plain_causal),
        {},
        "document 1, token 0 (row 4) sees document 0, token",
    ),
    "backward is blind": (
        other_backward(shifted_ranges(begin=1)),
        {},
        "document 0, token 1 (row 1) does not see document 0, token 0 (row 0) (no gradient of out",
    ),
    "dv summed over all rows": (
        tampered(lambda dq, dk, dv: (dq, dk, dv + 1e-3 * dv.sum(0))),
        {},
        "gradient of out with respect to the value",
    ),
    "dq shifted by a row": (
        tampered(lambda dq, dk, dv: (dq + 1e-3 * dq.roll(1, 0), dk, dv)),
        {},
        "document 1, token 0 (row 4) depends on document 0, token 3 (row 3): ",
    ),
    "dk one percent off": (tampered(lambda dq, dk, dv: (dq, dk * 1.01, dv)), {}, "dk is "),
    "dk times the norm of the whole": (
        tampered(lambda dq, dk, dv: (dq, dk * (1 + 1e-3 * dk.norm()), dv)),
        {},
        "in the backward, change of dk or dv",
    ),
    "gradient of lse dropped": (functools.partial(manual_with_lse, detach_lse=True), {}, "dk is "),
    "lse of another base": (
        lambda q, k, v, p: (dense(q, k, v, p), packattn.attention(q, k, v, p, return_lse=True)[1] / 0.6931),
        {},
        "lse is ",
    ),
    "no backward": (lambda q, k, v, p: dense(q, k, v, p).detach(), {}, "out does not require grad"),
    "lost padding": (
        lambda q, k, v, p: dense(q, k, v, p)[:-2],
        {},
        "are missing (tail=0 for a function without padding)",
    ),
    "other dtype": (lambda q, k, v, p: dense(q, k, v, p).double(), {}, "must have the dtype of the inputs"),
    "nothing": (lambda q, k, v, p: None, {}, "fn must return out or (out, lse), got NoneType"),
    "an empty tuple": (lambda q, k, v, p: (), {}, "fn must return out or (out, lse), got tuple"),
    "NaN": (lambda q, k, v, p: dense(q, k, v, p) * float("nan"), {}, "out is inf away"),
    "0 x NaN": (dense, {"poison": True}, "change of out when the key and value are NaN or Inf"),
    "0 x NaN in the backward": (
        lambda q, k, v, p: OtherBackward.apply(q, k, v, p, packattn.attention, dense),
        {"poison": True},
        "in the backward, change of dk or dv when the row's query and dout are NaN or Inf",
    ),
    "a sink that is not there": (dense, {"sinks": torch.zeros(4)}, "out is "),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_for_its_reason(name):
    fn, options, words = MUTANTS[name]
    report = check_attention(fn, LENGTHS, **options)
    assert not report.passed
    assert any(words in line for line in report.failures()), str(report)
    with pytest.raises(LeakError):
        report.raise_if_failed()
    assert "attention: FAILED" in str(report)
    json.dumps(report.to_dict())


def test_leak_in_the_backward_only_says_so():
    report = check_attention(other_backward(plain_causal), LENGTHS, tail=0)
    by_name = {check.name: check for check in report.checks}
    assert by_name["out by key"].leaks == by_name["out by value"].leaks == by_name["out by query"].leaks == 0
    assert by_name["gradient to key"].leaks == by_name["gradient to value"].leaks == 4 + 3 * 5
    assert report.influence.masked_fill(report.expected, 0).max() == 0
    assert report.gradient.masked_fill(report.expected, 0).max() > 0
    assert all(fault.size > 0 for fault in report.faults if fault.kind == "leak")


def test_only_one_head_is_blamed():
    report = check_attention(leak_in_one_head, LENGTHS)
    seen = [f.text for f in report.faults if f.relation == "row-key" and f.checks[0] == "out by key"]
    assert seen and all("query head 2, key head 1" in text for text in seen)


def test_forward_only():
    fn = lambda q, k, v, p: dense(q, k, v, p).detach()
    report = check_attention(fn, LENGTHS, backward=False)
    report.raise_if_failed()
    assert report.backward == "not checked (backward=False)" and report.backward in str(report)
    assert report.gradient is None
    assert not check_attention(plain_causal, LENGTHS, backward=False).passed


def test_what_changes_from_call_to_call_is_not_called_a_leak():
    noisy = check_attention(lambda q, k, v, p: dense(q, k, v, p) + torch.rand(()) * 1e-6, LENGTHS)
    assert not noisy.passed and not noisy.faults and "fn is not deterministic" in str(noisy)
    fn = tampered(lambda dq, dk, dv: (dq, dk * (1 + 1e-7 * torch.rand(())), dv))
    strict = check_attention(fn, LENGTHS)
    assert not strict.passed and not strict.faults and "the backward is not deterministic" in str(strict)
    lenient = check_attention(fn, LENGTHS, deterministic=False)
    lenient.raise_if_failed()
    assert "not by replacing inputs" in lenient.notes[-1]
    leaking = tampered(lambda dq, dk, dv: (dq, dk + torch.rand(()) * dk.roll(1, 0), dv))
    assert check_attention(leaking, LENGTHS, deterministic=False).leaks


def test_tolerance_is_relative_to_the_largest_value():
    assert check_attention(wrong_scale, LENGTHS, tolerance=0.05).passed
    assert not check_attention(wrong_scale, LENGTHS, tolerance=1e-4).passed


def test_inputs_and_random_state_are_left_alone():
    before = torch.get_rng_state()
    check_attention(dense, (2, 1), backward=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lengths": (5,)}, ValueError, "two documents between which something could leak"),
        ({"lengths": (5, 0)}, ValueError, "two documents between which something could leak"),
        ({"lengths": ()}, ValueError, "two documents"),
        ({"lengths": (2, -1)}, ValueError, "must not be negative"),
        ({"lengths": (2.5, 1.5)}, TypeError, "float"),
        ({"lengths": (2, 1), "head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"lengths": (2, 1), "sinks": torch.zeros(3)}, ValueError, r"sinks must be \[Hq\] = \[4\], got \[3\]"),
        ({"lengths": (2, 0), "lengths_k": (3, 0)}, ValueError, "two documents"),
        ({"lengths": (2, 1), "lengths_k": (3,)}, ValueError, "as many documents"),
        ({"lengths": (2, 1), "heads": (4, 3)}, ValueError, "heads must be"),
        ({"lengths": (2, 1), "dtype": torch.int32}, TypeError, "dtype must be a floating-point"),
        ({"lengths": (2, 1), "prefix_lengths": (1,)}, ValueError, "one entry per document"),
        ({"lengths": (2, 1), "mask": torch.ones(3, 3, dtype=torch.bool)}, ValueError, r"mask must be bool \[5, 5\]"),
        ({"lengths": (2, 1), "mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "hide some keys"),
    ],
    ids=str,
)
def test_what_can_show_nothing_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        check_attention(dense, **options)


def test_nothing_checked_never_passes():
    report = check_attention(dense, LENGTHS)
    empty = verify.AttentionReport(**{**vars(report), "checks": ()})
    assert not empty.passed and "nothing was checked" in empty.failures()
    assert not bool(empty) and bool(report)


# ---- positions ---------------------------------------------------------------------------------------------------


def test_right_positions_pass():
    packing = packattn.Packing.from_lengths([3, 0, 1, 2], total=8)
    report = check_positions(packing.position_ids, packing)
    report.raise_if_failed()
    assert report.checked == 6 and report.first is None and "passed" in str(report)
    check_positions(lambda p: p.position_ids[None].int(), packing).raise_if_failed()
    check_positions(torch.tensor([[0, 1, 0], [0, 1, 2]]), [2, 1, 3]).raise_if_failed()
    check_positions(torch.tensor([2, 3, 4, 2, 3]), [3, 2], start=2).raise_if_failed()
    # What padding has does not matter.
    check_positions(torch.tensor([0, 1, 2, 0, 0, 1, 7, -1]), packing).raise_if_failed()


def test_running_positions_name_the_first_wrong_token():
    report = check_positions(torch.arange(6), [3, 1, 2])
    assert not report.passed and report.wrong == 3 and report.documents_wrong == 2
    assert report.first == verify.PositionFault(row=3, document=1, token=0, got=3, wanted=0)
    with pytest.raises(LeakError, match=r"document 1, token 0 \(row 3\) has position 3, wanted 0"):
        report.raise_if_failed()
    assert "document 2, token 0 (row 4) has position 4, wanted 0" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["faults"][0]["row"] == 3


@pytest.mark.parametrize(
    ("positions", "row"),
    [([0, 1, 2, 1, 2], 3), ([1, 2, 3, 0, 1], 0), ([0, 1, 1, 0, 1], 2), ([0, 1, 50, 0, 1], 2), ([0, 1, 2, 0, 0], 4)],
    ids=str,
)
def test_wrong_positions(positions, row):
    assert check_positions(torch.tensor(positions), [3, 2]).first.row == row


def test_positions_that_cannot_be_checked_are_refused():
    with pytest.raises(ValueError, match="3-D"):
        check_positions(torch.zeros(3, 1, 5, dtype=torch.long), [3, 2])
    with pytest.raises(ValueError, match="5 tokens, got"):
        check_positions(torch.arange(4), [3, 2])
    with pytest.raises(TypeError, match="integers, got float32"):
        check_positions(torch.zeros(5), [3, 2])
    with pytest.raises(TypeError, match="tensor, or a function"):
        check_positions(lambda p: [0, 1], [2])
    with pytest.raises(ValueError, match="nothing|no positions"):
        check_positions(torch.arange(0), [0, 0])
