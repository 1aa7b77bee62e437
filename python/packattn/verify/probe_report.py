"""The report of probe: what was measured between the documents of one row, as numbers, text and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .report import Report, dtype_name, magnitude, plain, plural, table

_SHOWN, _LEAKS, _ERRORS = 16, 6, 4  # documents, leaks and errors that a text names


@dataclasses.dataclass(frozen=True)
class ProbeLeak:
    """One document seen from another.

    Attributes:
        document: whose logits moved.
        source: the document that was replaced.
        size: the largest change of the logits, 0 for a leak in the backward only.
        changed: how many logits changed.
        row: the row of ``document`` that moved most.
        key_row: the row of ``source`` that moves it, found by replacing fewer and fewer tokens; None where it was not
            looked for or takes several tokens together.
        key_size: by how much it does, or None.
        gradient: the largest gradient of ``document``'s logits with respect to ``source``'s embeddings, None where not
            checked.
        text: all of it in words.
    """

    document: int
    source: int
    size: float
    changed: int
    row: int | None
    key_row: int | None
    key_size: float | None
    gradient: float | None
    text: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ProbeReport(Report):
    """What probe found, for N documents in one row.

    Attributes:
        lengths: tokens of each document.
        dtype: of the logits.
        tolerance: what relative_error may be.
        error: float64 [N], largest difference between a document's logits packed and alone; 0 for a document without
            tokens.
        relative_error: float64 [N], the same relative to the document's largest logit.
        influence: float64 [N, N], ``influence[a, b]`` is the largest change of b's logits when a is replaced. Off the
            diagonal it must be exactly 0; on it, it must not be (the model answers to its input).
        changed: int64 [N, N], how many logits changed.
        gradient: float64 [N, N] or None, ``gradient[a, b]`` is the largest gradient of b's logits with respect to a's
            input embeddings; None where it was not checked, and ``backward`` says why.
        backward: "checked", or the reason why not.
        deterministic: two runs on the same input gave the same logits. If not, influence and gradient are not measured
            (all NaN, None), since a change could not be told from noise, and the report does not pass.
        leaks: every pair of documents of which one sees the other, largest first.
        problems: what else is wrong, in words.
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    tolerance: float
    error: torch.Tensor
    relative_error: torch.Tensor
    influence: torch.Tensor
    changed: torch.Tensor
    gradient: torch.Tensor | None
    backward: str
    deterministic: bool
    leaks: tuple[ProbeLeak, ...]
    problems: tuple[str, ...]

    @property
    def leak(self) -> float:
        """Largest change of one document's logits when another document is replaced; NaN if it was not measured."""
        return _off_diagonal(self.influence)

    @property
    def gradient_leak(self) -> float | None:
        """Largest gradient of one document's logits with respect to another's embeddings; None if not checked."""
        return None if self.gradient is None else _off_diagonal(self.gradient)

    @property
    def max_error(self) -> float:
        """Largest absolute difference between packed and alone."""
        return float(self.error.max())

    @property
    def max_relative_error(self) -> float:
        """Largest difference between packed and alone, relative to the document's largest logit."""
        return float(self.relative_error.max())

    @property
    def passed(self) -> bool:
        return (
            self.deterministic
            and not self.problems
            and not self.leaks
            and self.leak == 0
            and self.gradient_leak in (None, 0)
            and self.max_relative_error <= self.tolerance
        )

    def failures(self) -> list[str]:
        """What is wrong, a sentence each; empty if the report passed."""
        return [*self.problems, *(leak.text for leak in self.leaks), *self._errors()]

    def _errors(self) -> list[str]:
        return [
            f"document {index} is not what it is alone: its logits differ by {magnitude(error)}, {magnitude(relative)} of "
            f"its largest logit (allowed {magnitude(self.tolerance)})"
            for index, (error, relative) in enumerate(
                zip(self.error.tolist(), self.relative_error.tolist(), strict=True)
            )
            if not relative <= self.tolerance
        ]

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = plain(
            {
                "check": "probe",
                "passed": self.passed,
                "leak": self.leak,
                "gradient_leak": self.gradient_leak,
                "max_error": self.max_error,
                "max_relative_error": self.max_relative_error,
                "tolerance": self.tolerance,
                "deterministic": self.deterministic,
                "backward": self.backward,
                "dtype": dtype_name(self.dtype),
                "lengths": self.lengths,
                "error": self.error,
                "relative_error": self.relative_error,
                "influence": self.influence,
                "changed": self.changed,
                "gradient": self.gradient,
                "leaks": [dataclasses.asdict(leak) for leak in self.leaks],
                "problems": self.problems,
                "failures": self.failures(),
            }
        )
        return result

    def __str__(self) -> str:
        count = len(self.lengths)
        lines = [f"probe: {'passed' if self.passed else 'FAILED'}"]
        lines.append(
            f"  {plural(count, 'document')}, {plural(sum(self.lengths), 'token')}, {dtype_name(self.dtype)} logits"
        )
        lines.append("")
        lines += self._table()
        lines.append("")
        lines.append(
            f"  packed against alone: relative error {magnitude(self.max_relative_error)} (allowed {magnitude(self.tolerance)})"
        )
        if self.deterministic:
            pairs = int((self.influence.masked_fill(torch.eye(count, dtype=torch.bool), 0.0) != 0).sum())
            lines.append(
                f"  leak: {magnitude(self.leak)} (must be 0), in {pairs} of {plural(count * (count - 1), 'pair')} of documents"
            )
        else:
            lines.append("  leak: not measured, the model is not deterministic")
        gradient = self.gradient_leak
        lines.append(
            f"  backward: {self.backward}"
            if gradient is None
            else f"  backward: largest gradient from another document {magnitude(gradient)} (must be 0)"
        )
        failures = self.failures()
        shown = [*self.problems, *(leak.text for leak in self.leaks[:_LEAKS]), *self._errors()[:_ERRORS]]
        if failures:
            lines += ["", *(f"  - {line}" for line in shown)]
        if len(failures) > len(shown):
            lines.append(f"  - and {len(failures) - len(shown)} more")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """A line per document; of many documents the worst ones."""
        count = len(self.lengths)
        outside = self.influence.masked_fill(torch.eye(count, dtype=torch.bool), 0.0)
        received, sent = outside.amax(0).tolist(), outside.amax(1).tolist()
        changed = self.changed.masked_fill(torch.eye(count, dtype=torch.bool), 0).sum(0).tolist()
        header = ["document", "tokens", "packed - alone", "relative", "moved by others", "logits moved", "moves others"]
        if self.gradient is not None:
            header.append("gradient from others")
            gradients = self.gradient.masked_fill(torch.eye(count, dtype=torch.bool), 0.0).amax(0).tolist()
        order = list(range(count))
        if count > _SHOWN:
            worst = sorted(order, key=lambda i: (received[i], self.relative_error[i].item()), reverse=True)[:_SHOWN]
            order = sorted(worst)
        rows = []
        for i in order:
            row = [
                str(i),
                str(self.lengths[i]),
                magnitude(self.error[i].item()),
                magnitude(self.relative_error[i].item()),
            ]
            if self.deterministic:
                row += [magnitude(received[i]), str(changed[i]), magnitude(sent[i])]
            else:
                row += ["-", "-", "-"]
            if self.gradient is not None:
                row.append(magnitude(gradients[i]))
            rows.append(row)
        lines = table(header, rows)
        if count > _SHOWN:
            lines.append(f"  (the {_SHOWN} worst of {count} documents)")
        return lines


def _off_diagonal(matrix: torch.Tensor) -> float:
    """Largest entry off the diagonal; NaN if there is one."""
    inside = torch.eye(matrix.shape[0], dtype=torch.bool)
    return float(matrix.masked_fill(inside, 0.0).max())
