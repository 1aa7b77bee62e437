"""check_attention: which keys influence which query rows of an attention function, against the mask it should have.

Three ways of looking, because each sees what another misses:

- replacing a key, a value or a query and comparing outputs exactly (the forward, as it is);
- gradients of one output row alone, which must be exactly zero for every key the row does not see (the backward's own
  idea of the mask, which a hand-written backward may get wrong on its own);
- replacing a row's query and dout, or a key and a value, and comparing all gradients exactly (what a backward reads
  besides the mask).

Both kinds of fault count: a row that sees a key it must not (leak), and one that fails to see a key it must (blind).
That, and the distance of all values from a float64 formula, leaves no room for a function that returns zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..packing import Packing
from .attention_report import AttentionReport, Finding, ValueCheck, faults_of
from .expected import Formula, expected_mask
from .report import RowNames, Spans, difference, dtype_name, magnitude
from .subject import AttentionFunction, Subject, make_setup, not_deterministic

_RUNS = 16  # runs on the same inputs that must agree before fn is said to leak


def check_attention(
    fn: AttentionFunction,
    lengths: Sequence[int] | Packing = (5, 1, 7, 3),
    *,
    lengths_k: Sequence[int] | Packing | None = None,
    tail: int = 2,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    prefix_lengths: Sequence[int] | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backward: bool = True,
    deterministic: bool = True,
    poison: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> AttentionReport:
    """Checks an attention function on one small packed row.

    What the function is expected to do is described by the arguments; they are not passed on to it. For a window, say::

        check_attention(functools.partial(packattn.attention, window_size=(2, 0)), window_size=(2, 0))

    Args:
        fn: called as fn(q, k, v, packing), and with packing_k=... if lengths_k is given; q [Tq, Hq, D],
            k [Tk, Hkv, D], v [Tk, Hkv, Dv]. Returns out [Tq, Hq, Dv], or (out, lse) with lse [Hq, Tq].
        lengths: tokens of each document (zeros are allowed), or a Packing, which may have padding anywhere. Every
            token costs a few calls of fn per head.
        lengths_k: the same for the keys, if they are packed otherwise (then fn gets packing_k).
        tail: rows added after documents given as lengths. They are padding, which must give 0 and influence nothing.
            Use 0 for a function that takes no padding.
        causal, window_size, chunk_size, prefix_lengths: the mask, as for Packing.key_ranges.
        mask: bool [Tq, Tk], the mask itself, instead of what these four describe.
        scale, softcap, sinks: what the values must be, as for packattn.attention. None is 1 / sqrt(head_dim).
        heads: (Hq, Hkv).
        backward: False for a function without a backward; the report says that it was not checked.
        deterministic: False accepts a backward whose results differ from run to run (atomic additions); it is then
            checked by gradients of single rows alone.
        poison: also replace by NaN and Inf, which must not reach another document even as 0 * NaN. No dense mask can
            do that. Inside a document a hidden NaN may show.
        tolerance: largest error of the values, relative to the largest value. The default is twice the error of the
            formula in the same dtype, plus a floor of 8 roundings.
        seed: of the inputs.

    Returns:
        An AttentionReport. Comparisons are exact: equal means the same number (NaN equals NaN, -0 equals 0).

    Raises:
        ValueError: fewer than two documents between which something could leak, or arguments that do not fit.
        Exceptions of fn are not caught.
    """
    setup = make_setup(lengths, lengths_k, tail, heads, head_dim, head_dim_v, dtype, device, scale, seed)
    words = "the given mask"
    if mask is None:
        count = len(setup.documents)
        if prefix_lengths is not None and len(prefix_lengths) != count:
            raise ValueError(f"prefix_lengths must have one entry per document, {count}, got {len(prefix_lengths)}")
        mask = expected_mask(
            setup.documents,
            setup.documents_k,
            setup.q.shape[0],
            setup.k.shape[0],
            causal=causal,
            window_size=window_size,
            chunk_size=chunk_size,
            prefix_lengths=prefix_lengths,
        )
        words = _mask_words(causal, window_size, chunk_size, prefix_lengths)
    shape = (setup.q.shape[0], setup.k.shape[0])
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(f"mask must be bool {list(shape)}, got {dtype_name(mask.dtype)} {list(mask.shape)}")
    if sinks is not None and tuple(sinks.shape) != (heads[0],):
        raise ValueError(f"sinks must be [Hq] = [{heads[0]}], got {list(sinks.shape)}")
    mask = mask.cpu()
    if mask.all() or not mask.any():
        raise ValueError("the mask must hide some keys and show some, or there is nothing to check")
    formula = Formula(mask, setup.scale, softcap, None if sinks is None else sinks.detach().cpu())

    subject = Subject(fn, setup)
    problems = subject.first_call()
    notes: list[str] = []
    findings: list[Finding] = []
    values: list[ValueCheck] = []
    reason = "not checked (backward=False)" if not backward else "checked"
    if not problems:
        problems += _empty_rows(subject, mask, RowNames(setup.documents))
        found = _forward_findings(subject, formula)
        if poison:
            found += _poisoned_forward(subject, mask, _same_document(setup.documents, setup.documents_k, mask))
        # Noise that is rare may look like a leak: before blaming fn, see whether it is the same every time.
        noise = subject.forward_noise(_RUNS) if _any_leak(found) else 0.0
        if noise:
            problems.append(not_deterministic(noise))
        else:
            findings += found
        if backward and not subject.differentiable():
            reason = "not checked, out does not require grad"
            problems.append("out does not require grad: there is no backward to check (backward=False leaves it out)")
        elif backward:
            if not subject.lse_differentiable:
                notes.append("the gradient through lse was not checked: fn returns no lse that requires grad")
            findings += _gradient_findings(subject, formula)
            noise, found = subject.backward_noise(), []
            if noise == 0:
                found = _backward_findings(subject, formula, poison)
                noise = subject.backward_noise(_RUNS) if _any_leak(found) else 0.0
            if noise == 0:
                findings += found
            elif deterministic:
                problems.append(
                    f"the backward is not deterministic: runs on the same inputs differ by {magnitude(noise)}, so replacing "
                    "inputs shows nothing (deterministic=False checks it by gradients of single rows alone)"
                )
            else:
                notes.append(
                    f"the backward is not deterministic (runs on the same inputs differ by {magnitude(noise)}): it was "
                    "checked by gradients of single rows, not by replacing inputs"
                )
        values = _values(subject, formula, reason == "checked", tolerance)
    return _report(subject, mask, words, findings, values, problems, notes, reason)


def _any_leak(findings: list[Finding]) -> bool:
    return any(finding.check().leaks for finding in findings)


def _replaced(x: Tensor, index: Any, by: Tensor | float) -> Tensor:
    changed = x.clone()
    changed[index] = by[index] if isinstance(by, Tensor) else by
    return changed


def _empty_rows(subject: Subject, mask: Tensor, names: RowNames) -> list[str]:
    """Rows that see nothing give exactly 0."""
    size = difference(subject.out, torch.zeros_like(subject.out)).amax((1, 2)).cpu()
    wrong = ((size != 0) & ~mask.any(-1)).nonzero().flatten().tolist()
    if not wrong:
        return []
    row = wrong[0]
    return [f"{names(row)} sees no key, but its out is not 0: {magnitude(size[row].item())} (rows {wrong})"]


def _weighted(formula: Formula) -> Tensor:
    """bool [Tq, Tk]: where the key matters. A row's only key has weight 1 whatever it is, unless there is a sink."""
    if formula.scale == 0:
        return torch.zeros_like(formula.mask)
    alone = formula.mask.sum(-1) < 2
    return formula.mask & ~(alone & (formula.sinks is None))[:, None]


def _forward_findings(subject: Subject, formula: Formula) -> list[Finding]:
    s, mask = subject.setup, formula.mask
    heads_q, heads_k, total_q, total_k = s.q.shape[1], s.k.shape[1], s.q.shape[0], s.k.shape[0]
    by_key, by_value, lse_by_key = torch.zeros(3, heads_q, heads_k, total_q, total_k, dtype=torch.float64)
    for head in range(heads_k):
        for key in range(total_k):
            out, lse = subject.forward(k=_replaced(s.k, (key, head), s.other_k))
            by_key[:, head, :, key] = difference(out, subject.out).amax(-1).T.cpu()
            if lse is not None and subject.lse is not None:
                lse_by_key[:, head, :, key] = difference(lse, subject.lse).cpu()
            out, _ = subject.forward(v=_replaced(s.v, (key, head), s.other_v))
            by_value[:, head, :, key] = difference(out, subject.out).amax(-1).T.cpu()
    by_query = torch.zeros(total_q, total_q, dtype=torch.float64)
    for row in range(total_q):
        out, _ = subject.forward(q=_replaced(s.q, row, s.other_q))
        by_query[:, row] = difference(out, subject.out).amax((1, 2)).cpu()
    weighted = _weighted(formula)
    own = torch.diag(weighted.any(-1))
    findings = [
        Finding("out by key", "row-key", by_key, mask, weighted),
        Finding("out by value", "row-key", by_value, mask, mask),
    ]
    if subject.lse is not None:
        seen = mask if formula.scale else torch.zeros_like(mask)
        findings.append(Finding("lse by key", "row-key", lse_by_key, mask, seen))
    findings.append(Finding("out by query", "row-row", by_query[None, None], torch.diag(mask.any(-1)), own))
    return findings


def _poisoned_forward(subject: Subject, mask: Tensor, near: Tensor) -> list[Finding]:
    s = subject.setup
    by_key = torch.zeros(mask.shape, dtype=torch.float64)
    by_query = torch.zeros(mask.shape[0], mask.shape[0], dtype=torch.float64)
    for poison in (math.nan, math.inf):
        for key in range(mask.shape[1]):
            out, lse = subject.forward(k=_replaced(s.k, key, poison), v=_replaced(s.v, key, poison))
            by_key[:, key] = torch.maximum(by_key[:, key], _row_difference(subject, out, lse))
        for row in range(mask.shape[0]):
            out, lse = subject.forward(q=_replaced(s.q, row, poison))
            by_query[:, row] = torch.maximum(by_query[:, row], _row_difference(subject, out, lse))
    rows = _linked(near)
    return [
        Finding("out by poisoned key", "row-key", by_key[None, None], near, torch.zeros_like(near)),
        Finding("out by poisoned query", "row-row", by_query[None, None], rows, torch.zeros_like(rows)),
    ]


def _same_document(documents: Spans, documents_k: Spans, mask: Tensor) -> Tensor:
    """bool [Tq, Tk]: row and key lie in one document, or the mask joins them."""
    queries, keys = RowNames(documents), RowNames(documents_k)
    row = torch.tensor([queries.document_of(i) for i in range(mask.shape[0])])
    key = torch.tensor([keys.document_of(j) for j in range(mask.shape[1])])
    return ((row[:, None] == key) & (row[:, None] >= 0)) | mask


def _linked(mask: Tensor) -> Tensor:
    """bool [Tq, Tq]: two rows have a key in common."""
    return (mask.double() @ mask.double().T) > 0


def _row_difference(subject: Subject, out: Tensor, lse: Tensor | None) -> Tensor:
    moved = difference(out, subject.out).amax((1, 2)).cpu()
    if lse is not None and subject.lse is not None:
        moved = torch.maximum(moved, difference(lse, subject.lse).amax(0).cpu())
    return moved


def _gradient_findings(subject: Subject, formula: Formula) -> list[Finding]:
    """Gradients of one row and head of out at a time (and of its lse)."""
    s, mask = subject.setup, formula.mask
    heads_q, heads_k, total_q, total_k = s.q.shape[1], s.k.shape[1], s.q.shape[0], s.k.shape[0]
    to_key, to_value = torch.zeros(2, heads_q, heads_k, total_q, total_k, dtype=torch.float64)
    to_query = torch.zeros(total_q, total_q, dtype=torch.float64)
    full_dlse = subject.full_dlse()
    for row in range(total_q):
        for head in range(heads_q):
            dout, dlse = torch.zeros_like(s.dout), torch.zeros_like(full_dlse)
            dout[row, head] = s.dout[row, head]
            dlse[head, row] = full_dlse[head, row]
            dq, dk, dv = (
                difference(grad, torch.zeros_like(grad)).amax(-1).cpu() for grad in subject.gradients(dout, dlse)
            )
            to_key[head, :, row] = dk.T
            to_value[head, :, row] = dv.T
            to_query[row] = torch.maximum(to_query[row], dq.amax(-1))
    weighted = _weighted(formula)
    return [
        Finding("gradient to key", "row-key", to_key, mask, weighted),
        Finding("gradient to value", "row-key", to_value, mask, mask),
        Finding(
            "gradient to query", "row-row", to_query[None, None], torch.diag(mask.any(-1)), torch.diag(weighted.any(-1))
        ),
    ]


def _backward_findings(subject: Subject, formula: Formula, poison: bool) -> list[Finding]:
    """All gradients with one row's query and dout, or one key and value, replaced."""
    findings = _replaced_backward(subject, formula, None)
    if poison:
        worst: list[Finding] = []
        for bad in (math.nan, math.inf):
            found = _replaced_backward(subject, formula, bad)
            for old, new in zip(worst, found, strict=False):
                old.found = torch.maximum(old.found, new.found)
            worst = worst or found
        findings += worst
    return findings


def _replaced_backward(subject: Subject, formula: Formula, bad: float | None) -> list[Finding]:
    s, mask = subject.setup, formula.mask
    total_q, total_k = mask.shape
    dlse = subject.full_dlse()
    base = subject.gradients(s.dout, dlse)

    def moved(grads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        dq, dk, dv = (difference(new, old).amax((1, 2)).cpu() for new, old in zip(grads, base, strict=True))
        return dq, torch.maximum(dk, dv)

    key_by_row = torch.zeros(total_q, total_k, dtype=torch.float64)
    row_by_key = torch.zeros(total_q, total_k, dtype=torch.float64)
    row_by_row = torch.zeros(total_q, total_q, dtype=torch.float64)
    key_by_key = torch.zeros(total_k, total_k, dtype=torch.float64)
    for row in range(total_q):
        q = _replaced(s.q, row, s.other_q if bad is None else bad)
        dout = _replaced(s.dout, row, s.other_dout if bad is None else bad)
        row_by_row[:, row], key_by_row[row] = moved(subject.gradients(dout, dlse, q=q))
    for key in range(total_k):
        k = _replaced(s.k, key, s.other_k if bad is None else bad)
        v = _replaced(s.v, key, s.other_v if bad is None else bad)
        row_by_key[:, key], key_by_key[:, key] = moved(subject.gradients(s.dout, dlse, k=k, v=v))
    weighted = _weighted(formula)
    visible, sees = mask, torch.diag(mask.any(-1))
    if bad is not None:
        visible = _same_document(s.documents, s.documents_k, mask)
        sees = _linked(visible)
    together = _linked(visible.T)  # two keys that some row sees both
    required = {"row": mask, "key": weighted, "own": torch.diag(weighted.any(-1))}
    if bad is not None:
        required = {name: torch.zeros_like(pairs) for name, pairs in required.items()}
    poisoned = "" if bad is None else "poisoned "
    return [
        Finding(f"dk, dv by {poisoned}row", "row-key", key_by_row[None, None], visible, required["row"]),
        Finding(f"dq by {poisoned}key", "row-key", row_by_key[None, None], visible, required["key"]),
        Finding(f"dq by {poisoned}row", "row-row", row_by_row[None, None], sees, required["own"]),
        Finding(f"dk, dv by {poisoned}key", "key-key", key_by_key[None, None], together, torch.zeros_like(together)),
    ]


def _values(subject: Subject, formula: Formula, backward: bool, tolerance: float | None) -> list[ValueCheck]:
    """Distance of all results from the formula in float64, and what the formula itself loses in the same dtype."""
    s = subject.setup
    dtype, eps = s.q.dtype, torch.finfo(s.q.dtype).eps

    def results(precision: torch.dtype) -> list[tuple[str, Tensor]]:
        q, k, v = (x.cpu().to(precision).requires_grad_(True) for x in (s.q, s.k, s.v))
        out, lse = formula(q, k, v)
        found = [("out", out.detach())]
        if subject.lse is not None:
            found.append(("lse", lse.detach()))
        if backward:
            outputs, grads = [out], [s.dout.cpu().to(precision)]
            if subject.lse_differentiable:
                outputs.append(lse)
                grads.append(s.dlse.cpu().to(precision).masked_fill(~lse.isfinite(), 0.0))
            found += zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, (q, k, v), grads), strict=True)
        return found

    got: dict[str, Tensor] = {"out": subject.out}
    if subject.lse is not None:
        got["lse"] = subject.lse
    if backward:
        got |= zip(("dq", "dk", "dv"), subject.gradients(s.dout, subject.full_dlse()), strict=True)
    checks = []
    for (name, exact), (_, rounded) in zip(results(torch.float64), results(dtype), strict=True):
        largest = exact.masked_fill(~exact.isfinite(), 0.0).abs().max().item()
        allowed = 2 * difference(rounded.double(), exact).max().item() + 8 * eps * largest
        if tolerance is not None:
            allowed = tolerance * largest
        checks.append(ValueCheck(name, difference(got[name].cpu().double(), exact).max().item(), allowed))
    if backward:
        # The forward that builds a graph may be another kernel than the one that does not.
        with torch.enable_grad():
            out, _ = subject.call(*(x.clone().requires_grad_(True) for x in (s.q, s.k, s.v)))
        exact = results(torch.float64)[0][1]
        checks.insert(
            1,
            ValueCheck(
                "out, with gradients", difference(out.detach().cpu().double(), exact).max().item(), checks[0].allowed
            ),
        )
    return checks


def _report(
    subject: Subject,
    mask: Tensor,
    words: str,
    findings: list[Finding],
    values: list[ValueCheck],
    problems: list[str],
    notes: list[str],
    reason: str,
) -> AttentionReport:
    s = subject.setup
    by_name = {finding.name: finding.found.amax((0, 1)) for finding in findings}
    influence = torch.zeros(mask.shape, dtype=torch.float64)
    if "out by key" in by_name:
        influence = torch.maximum(by_name["out by key"], by_name["out by value"])
    gradient = None
    if "gradient to key" in by_name:
        gradient = torch.maximum(by_name["gradient to key"], by_name["gradient to value"])
    queries = RowNames(s.documents)
    keys = queries if s.packing_k is None else RowNames(s.documents_k, "key row")
    return AttentionReport(
        documents=s.documents,
        documents_k=s.documents_k,
        heads=(s.q.shape[1], s.k.shape[1]),
        mask=words,
        dtype=s.q.dtype,
        device=str(s.q.device),
        expected=mask,
        influence=influence,
        gradient=gradient,
        checks=tuple(finding.check() for finding in findings),
        values=tuple(values),
        faults=faults_of(findings, queries, keys),
        backward=reason if not problems or findings else "not checked",
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _mask_words(
    causal: bool, window_size: tuple[int, int], chunk_size: int, prefix_lengths: Sequence[int] | None
) -> str:
    words = "causal" if causal else "bidirectional"
    if tuple(window_size) != (-1, -1):
        words += f", window {tuple(window_size)}"
    if chunk_size:
        words += f", chunks of {chunk_size}"
    if prefix_lengths is not None:
        words += f", prefixes {list(prefix_lengths)}"
    return words
