"""The report of check_attention: what was looked at, what was found, and each fault in words."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from .report import Report, RowNames, Spans, dtype_name, magnitude, plain, table

_SHOWN = 10  # faults that a text names

_Kind = Literal["leak", "blind", "head"]
_Relation = Literal["row-key", "row-row", "key-key"]


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """One way of looking for influence, over all pairs.

    Attributes:
        name: as in the text table.
        relation: what the pairs are: "row-key" [Tq, Tk], "row-row" [Tq, Tq] or "key-key" [Tk, Tk], the one that is
            influenced first.
        found: float64, the size of the influence, 0 for none.
        allowed: bool, where there may be some.
        required: bool, where there must be.
    """

    name: str
    relation: _Relation
    found: Tensor
    allowed: Tensor
    required: Tensor

    @property
    def hidden(self) -> int:
        """Pairs that must not influence each other."""
        return int((~self.allowed).sum())

    @property
    def needed(self) -> int:
        """Pairs that must."""
        return int(self.required.sum())

    @property
    def leaks(self) -> int:
        """Pairs that influence each other and must not."""
        return int(((self.found != 0) & ~self.allowed).sum())

    @property
    def blind(self) -> int:
        """Pairs that must influence each other and do not."""
        return int(((self.found == 0) & self.required).sum())

    @property
    def largest_leak(self) -> float:
        """The largest influence where there must be none."""
        return float(self.found.masked_fill(self.allowed, 0.0).max()) if self.found.numel() else 0.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """One pair that is wrong.

    Attributes:
        kind: "leak" (an influence that must not be), "blind" (one that is missing) or "head" (a query head that reads
            another key head than its own).
        relation: as in Check.
        first: the row, key or head that is influenced.
        second: the one that influences it.
        size: of the influence, 0 for blind.
        checks: the names of the checks that see it, that of ``size`` first.
        documents: of first and second, -1 for padding; None for heads.
        text: all of it in words.
    """

    kind: _Kind
    relation: _Relation
    first: int
    second: int
    size: float
    checks: tuple[str, ...]
    documents: tuple[int, int] | None
    text: str

    @property
    def across(self) -> bool:
        """The pair lies in two documents, or one of it in padding."""
        return self.documents is not None and (self.documents[0] != self.documents[1] or self.documents[0] < 0)


@dataclasses.dataclass(frozen=True)
class ValueCheck:
    """Distance of a result from the float64 formula: the largest difference, and the largest that is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """The error is allowed; NaN is not."""
        return self.error <= self.allowed


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionReport(Report):
    """What check_attention found.

    Attributes:
        documents: first row of each document and one past its last, of the queries.
        documents_k: the same of the keys.
        heads: (Hq, Hkv).
        mask: the expected mask in words.
        dtype: of the inputs.
        device: of the inputs.
        expected: bool [Tq, Tk], the mask.
        influence: float64 [Tq, Tk], how far ``out[i]`` moves when ``k[j]`` or ``v[j]`` is replaced.
        gradient: float64 [Tq, Tk] or None, the largest gradient of ``out[i]`` with respect to ``k[j]`` and ``v[j]``.
        checks: every way of looking, with its counts.
        values: the distance from the float64 formula.
        faults: every pair that is wrong; leaks between documents first, then by size.
        backward: "checked", or the reason why not.
        problems: what else is wrong, in words.
        notes: what was left out.
    """

    documents: Spans
    documents_k: Spans
    heads: tuple[int, int]
    mask: str
    dtype: torch.dtype
    device: str
    expected: Tensor
    influence: Tensor
    gradient: Tensor | None
    checks: tuple[Check, ...]
    values: tuple[ValueCheck, ...]
    faults: tuple[Fault, ...]
    backward: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document of the queries."""
        return tuple(end - start for start, end in self.documents)

    @property
    def lengths_k(self) -> tuple[int, ...]:
        """Tokens of each document of the keys."""
        return tuple(end - start for start, end in self.documents_k)

    @property
    def leak(self) -> float:
        """The largest influence where there must be none, in any check."""
        return max((check.largest_leak for check in self.checks), default=0.0)

    @property
    def leaks(self) -> int:
        """How many pairs leak."""
        return sum(fault.kind == "leak" for fault in self.faults)

    @property
    def blind(self) -> int:
        """How many pairs lack an influence that must be there."""
        return sum(fault.kind == "blind" for fault in self.faults)

    @property
    def error(self) -> float:
        """The largest distance of out from the float64 formula; NaN if it was not measured."""
        return next((value.error for value in self.values if value.name == "out"), float("nan"))

    @property
    def passed(self) -> bool:
        return (
            bool(self.checks)
            and any(check.hidden for check in self.checks)
            and any(check.needed for check in self.checks)
            and bool(self.values)
            and not self.faults
            and not self.problems
            and all(value.passed for value in self.values)
        )

    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty if the report passed."""
        lines = list(self.problems)
        lines += [fault.text for fault in self.faults]
        lines += [
            f"{value.name} is {magnitude(value.error)} away from the float64 result (allowed {magnitude(value.allowed)})"
            for value in self.values
            if not value.passed
        ]
        if not self.checks and not self.problems:
            lines.append("nothing was checked")
        return lines

    def to_dict(self) -> dict[str, Any]:
        checks = [
            {
                "name": check.name,
                "relation": check.relation,
                "hidden": check.hidden,
                "leaks": check.leaks,
                "largest_leak": check.largest_leak,
                "needed": check.needed,
                "blind": check.blind,
            }
            for check in self.checks
        ]
        result: dict[str, Any] = plain(
            {
                "check": "check_attention",
                "passed": self.passed,
                "leak": self.leak,
                "leaks": self.leaks,
                "blind": self.blind,
                "error": self.error,
                "documents": self.documents,
                "documents_k": self.documents_k,
                "heads": self.heads,
                "mask": self.mask,
                "dtype": dtype_name(self.dtype),
                "device": self.device,
                "expected": self.expected,
                "influence": self.influence,
                "gradient": self.gradient,
                "checks": checks,
                "values": [dataclasses.asdict(value) for value in self.values],
                "faults": [dataclasses.asdict(fault) for fault in self.faults],
                "backward": self.backward,
                "problems": self.problems,
                "notes": self.notes,
                "failures": self.failures(),
            }
        )
        return result

    def __str__(self) -> str:
        lines = [f"attention: {'passed' if self.passed else 'FAILED'}"]
        lengths = _lengths(self.lengths)
        if self.lengths_k != self.lengths:
            lengths += f" queries, {_lengths(self.lengths_k)} keys"
        lines.append(
            f"  documents of {lengths} tokens, {self.expected.shape[0]} rows, heads {self.heads[0]}/{self.heads[1]}, "
            f"{dtype_name(self.dtype)} on {self.device}, {self.mask}"
        )
        if self.checks:
            rows = [
                (c.name, str(c.hidden), str(c.leaks), magnitude(c.largest_leak), str(c.needed), str(c.blind))
                for c in self.checks
            ]
            lines += ["", *table(("influence", "hidden", "leaks", "largest", "needed", "blind"), rows)]
        if self.values:
            rows_ = [(value.name, magnitude(value.error), magnitude(value.allowed)) for value in self.values]
            lines += ["", *table(("value", "error", "allowed"), rows_)]
        if self.backward != "checked":
            lines += ["", f"  backward: {self.backward}"]
        lines += [f"  note: {note}" for note in self.notes]
        failures = self.failures()
        if failures:
            lines += ["", *self._counts()]
            shown = self._shown()
            lines += [f"  - {line}" for line in shown]
            if len(failures) > len(shown):
                lines.append(f"  - and {len(failures) - len(shown)} more")
        return "\n".join(lines)

    def _counts(self) -> list[str]:
        """A line for each kind of fault that occurs."""
        lines = []
        for kind, words in (("leak", "leaks"), ("head", "crossed heads"), ("blind", "missing")):
            relations = [fault.relation for fault in self.faults if fault.kind == kind]
            if kind == "head" and relations:
                lines.append(f"  {words}: {len(relations)}")
            elif relations:
                counts = [
                    f"{relations.count(name)} {name}" for name in ("row-key", "row-row", "key-key") if name in relations
                ]
                lines.append(f"  {words}: {', '.join(counts)} {'pair' if len(relations) == 1 else 'pairs'}")
        return lines

    def _shown(self) -> list[str]:
        """The failures that the text names: of the faults, the worst between every two documents."""
        told, texts = set(), []
        for fault in self.faults:
            about = (fault.kind, fault.relation, fault.documents or (fault.first, fault.second))
            if about not in told:
                told.add(about)
                texts.append(fault.text)
        values = self.failures()[len(self.problems) + len(self.faults) :]
        return [*self.problems, *texts[:_SHOWN], *values]


# How the number of a check came about.
_HOW = {
    "out by key": "change of out when the key is replaced",
    "out by value": "change of out when the value is replaced",
    "lse by key": "change of lse when the key is replaced",
    "out by query": "change of out when the query is replaced",
    "gradient to key": "gradient of out with respect to the key",
    "gradient to value": "gradient of out with respect to the value",
    "gradient to query": "gradient of out with respect to the query",
    "dk, dv by row": "in the backward, change of dk or dv when the row's query and dout are replaced",
    "dq by key": "in the backward, change of dq when the key and value are replaced",
    "dq by row": "in the backward, change of dq when the row's query and dout are replaced",
    "dk, dv by key": "in the backward, change of dk or dv when the key and value are replaced",
    "out by poisoned key": "change of out when the key and value are NaN or Inf",
    "out by poisoned query": "change of out when the query is NaN or Inf",
    "dk, dv by poisoned row": "in the backward, change of dk or dv when the row's query and dout are NaN or Inf",
    "dq by poisoned key": "in the backward, change of dq when the key and value are NaN or Inf",
    "dq by poisoned row": "in the backward, change of dq when the row's query and dout are NaN or Inf",
    "dk, dv by poisoned key": "in the backward, change of dk or dv when the key and value are NaN or Inf",
}


@dataclasses.dataclass
class Finding:
    """What a check measured, with the heads where they were told apart.

    found: float64 [Hq, Hkv, A, B], or [1, 1, A, B] where heads were not told apart.
    """

    name: str
    relation: _Relation
    found: Tensor
    allowed: Tensor
    required: Tensor

    def own(self, head: int) -> int:
        """The key head that a query head reads."""
        return head // (self.found.shape[0] // self.found.shape[1])

    def own_heads(self) -> Tensor:
        """[Hq, A, B]: what each query head takes from its own key head."""
        return torch.stack([self.found[head, self.own(head)] for head in range(self.found.shape[0])])

    def check(self) -> Check:
        """The heads put together: the largest influence; but blind in any head is blind."""
        own = self.own_heads()
        largest = self.found.amax((0, 1))
        blind = self.required & (own == 0).any(0)
        return Check(self.name, self.relation, largest.masked_fill(blind, 0.0), self.allowed, self.required)


def faults_of(findings: list[Finding], queries: RowNames, keys: RowNames) -> tuple[Fault, ...]:
    """Every wrong pair once, in words, with all the checks that see it."""
    seen: dict[tuple[_Kind, _Relation, int, int], list[tuple[float, str, str]]] = {}
    for finding in findings:
        own = finding.own_heads()
        largest = finding.found.amax((0, 1))
        for a, b in ((largest != 0) & ~finding.allowed).nonzero().tolist():
            seen.setdefault(("leak", finding.relation, a, b), []).append(
                (float(largest[a, b]), finding.name, _heads(finding, a, b))
            )
        for a, b in ((own == 0).any(0) & finding.required).nonzero().tolist():
            blind = (own[:, a, b] == 0).nonzero().flatten().tolist()
            where = f", query head {', '.join(map(str, blind))}" if 1 < finding.found.shape[0] != len(blind) else ""
            seen.setdefault(("blind", finding.relation, a, b), []).append((0.0, finding.name, where))
        for head in range(finding.found.shape[0]):
            for other in range(finding.found.shape[1]):
                crossed = finding.found[head, other].masked_fill(~finding.allowed, 0.0)
                if other != finding.own(head) and crossed.any():
                    row, key = divmod(int(crossed.argmax()), crossed.shape[1])
                    where = f", at {queries(row)} and {keys(key)}; wanted key head {finding.own(head)} only"
                    seen.setdefault(("head", finding.relation, head, other), []).append(
                        (float(crossed.max()), finding.name, where)
                    )
    faults = [_fault(key, sightings, queries, keys) for key, sightings in seen.items()]
    kinds, relations = ("leak", "head", "blind"), ("row-key", "row-row", "key-key")

    def order(fault: Fault) -> tuple[Any, ...]:
        padding = fault.documents is not None and min(fault.documents) < 0
        place = (kinds.index(fault.kind), not fault.across, padding, relations.index(fault.relation))
        return (*place, -fault.size, fault.first, fault.second)

    return tuple(sorted(faults, key=order))


_VERBS = {"row-key": "sees", "row-row": "depends on", "key-key": "as a key depends on"}
_NOT_VERBS = {"row-key": "does not see", "row-row": "does not depend on", "key-key": "as a key does not depend on"}


def _fault(
    pair: tuple[_Kind, _Relation, int, int],
    sightings: list[tuple[float, str, str]],
    queries: RowNames,
    keys: RowNames,
) -> Fault:
    kind, relation, first, second = pair
    size, name, where = sightings[0]  # the first check in order: the plainest way to see it
    checks = tuple(check for _, check, _ in sightings)
    how = (
        _HOW[name]
        + where
        + (f"; {len(checks)} checks {'miss' if kind == 'blind' else 'see'} it" if len(checks) > 1 else "")
    )
    if kind == "head":
        text = f"query head {first} reads key head {second}: {magnitude(size)} ({how})"
        return Fault(kind, relation, first, second, size, checks, None, text)
    names_a, names_b = {"row-key": (queries, keys), "row-row": (queries, queries), "key-key": (keys, keys)}[relation]
    documents = (names_a.document_of(first), names_b.document_of(second))
    if kind == "leak":
        hidden = ", which the mask hides" if documents[0] == documents[1] >= 0 else ""
        text = f"{names_a(first)} {_VERBS[relation]} {names_b(second)}{hidden}: {magnitude(size)} ({how})"
    else:
        text = f"{names_a(first)} {_NOT_VERBS[relation]} {names_b(second)} (no {how})"
    return Fault(kind, relation, first, second, size, checks, documents, text)


def _heads(finding: Finding, a: int, b: int) -> str:
    """ ", query head 1, key head 0" for the largest influence, if heads were told apart."""
    heads_q, heads_k = finding.found.shape[:2]
    if heads_q == 1:
        return ""
    head, other = divmod(int(finding.found[:, :, a, b].argmax()), heads_k)
    return f", query head {head}, key head {other}"


def _lengths(lengths: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return shown + (f", ... ({len(lengths)} documents)" if len(lengths) > 8 else "")
