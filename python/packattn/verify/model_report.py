"""What check_model found."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from .report import Report, Spans, magnitude, plain, plural, table


@dataclasses.dataclass(frozen=True)
class WayReport:
    """What one implementation does with one way of calling.

    Attributes:
        implementation: the attention implementation.
        way: the name of the :class:`Way`.
        verdict: "ok", "leaks", "differs", "rounding" (a mixture of experts, whose router groups tokens of several
            documents) or "not run".
        leak: largest change of a document's logits when another is replaced; must be 0.
        error: largest difference of a document's logits from those alone.
        relative_error: the same, relative to its largest logit.
        positions: "restart", "run on" or "not seen".
        note: the reason it was not run, or the line that mends it.
    """

    implementation: str
    way: str
    verdict: str
    leak: float
    error: float
    relative_error: float
    positions: str
    note: str

    @property
    def passed(self) -> bool:
        """Nothing leaks, and the logits are those of the documents alone."""
        return self.verdict in ("ok", "rounding")


@dataclasses.dataclass(frozen=True, eq=False)
class KeyInfluence:
    """Which query sees which key, token by token, for one way of calling. T: the tokens of all documents, row by row.

    Attributes:
        implementation: the attention implementation.
        way: the name of the :class:`Way`.
        documents: first and one past the last token of each.
        expected: bool [T, T], what a query (row) may see of a key (column): what it sees in its document alone.
        required: the part of that which is too large to vanish in rounding.
        found: float64 [T, T], the largest change of the query's logits when the key's token is replaced by another.
    """

    implementation: str
    way: str
    documents: Spans
    expected: Tensor
    required: Tensor
    found: Tensor

    @property
    def leaks(self) -> int:
        """How many pairs of query and key see each other and must not."""
        return int(((self.found != 0) & ~self.expected).sum())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelReport(Report):
    """What check_model found. It passes if every row that ran passed and at least one ran.

    Attributes:
        model: its class.
        lengths: of the documents.
        tolerance: of packed against alone, relative to the largest logit of the document.
        rows: implementation by implementation, in the order asked for.
        keys: what sees what, token by token, if it was asked for.
    """

    model: str
    lengths: tuple[int, ...]
    tolerance: float
    rows: tuple[WayReport, ...]
    keys: tuple[KeyInfluence, ...] = ()

    @property
    def passed(self) -> bool:
        ran = [row for row in self.rows if row.verdict != "not run"]
        return bool(ran) and all(row.passed for row in ran)

    def failures(self) -> list[str]:
        """What is wrong, and the line that mends it; what is mended alike is put together."""
        failed = [row for row in self.rows if not row.passed and row.verdict != "not run"]
        lines = []
        for note in dict.fromkeys(row.note for row in failed):
            groups: dict[tuple[str, ...], list[str]] = {}  # the ways that fail -> the implementations in which they do
            for name in dict.fromkeys(row.implementation for row in failed):
                ways = tuple(row.way for row in failed if (row.implementation, row.note) == (name, note))
                if ways:
                    groups.setdefault(ways, []).append(name)
            for ways, names in groups.items():
                alike = [row for row in failed if row.note == note and row.implementation in names]
                worst = max(alike, key=lambda row: (row.leak, row.error))
                lines.append(f"{', '.join(names)}: {'; '.join(ways)}: {_fault(worst)}. Instead: {note}")
        return lines

    def of(self, implementation: str) -> tuple[WayReport, ...]:
        """The rows of one implementation."""
        return tuple(row for row in self.rows if row.implementation == implementation)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(
            {
                "check": "model",
                "passed": self.passed,
                "model": self.model,
                "lengths": self.lengths,
                "tolerance": self.tolerance,
                "rows": [{**dataclasses.asdict(row), "passed": row.passed} for row in self.rows],
                "failures": self.failures(),
                "keys": [
                    {
                        "implementation": one.implementation,
                        "way": one.way,
                        "documents": one.documents,
                        "leaks": one.leaks,
                        "expected": one.expected,
                        "found": one.found,
                    }
                    for one in self.keys
                ],
            }
        )
        return found

    def __str__(self) -> str:
        lines = [f"check_model: {'passed' if self.passed else 'FAILED'}"]
        lines.append(f"  {self.model}, documents of {', '.join(map(str, self.lengths))} tokens")
        header = ["implementation, way of calling", "leak", "packed - alone", "relative", "positions", "verdict"]
        cells = [
            [
                f"{row.implementation}: {row.way}",
                *("-" if math.isnan(x) else magnitude(x) for x in (row.leak, row.error, row.relative_error)),
                row.positions,
                row.verdict,
            ]
            for row in self.rows
        ]
        lines += ["", *table(header, cells), ""]
        lines += [f"  - {line}" for line in self.failures()]
        for one in self.keys:
            if one.leaks:
                pairs = plural(one.leaks, "pair")
                lines.append(
                    f"  - {one.implementation}: {one.way}: {pairs} of query and key see each other and must not"
                )
        for name in dict.fromkeys(row.implementation for row in self.rows):
            missing = [row for row in self.of(name) if row.verdict == "not run"]
            for note in dict.fromkeys(row.note for row in missing):
                where = "; ".join(row.way for row in missing if row.note == note)
                everywhere = len(missing) == len(self.of(name)) and len({row.note for row in missing}) == 1
                lines.append(f"  - {name} was not run{'' if everywhere else f' ({where})'}: {note}")
        return "\n".join(lines).rstrip()


def _fault(row: WayReport) -> str:
    if row.verdict == "leaks":
        return f"documents see each other, {magnitude(row.leak)} is what logits move by"
    return f"logits differ from the documents alone by {magnitude(row.error)}"
