"""What every report of packattn.verify shares: verdict, text, JSON, and the names of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class LeakError(AssertionError):
    """A check failed. The message is the report's text; `report` is the report itself."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Report:
    """Base of the reports: they know whether they passed, and say in words what failed."""

    @property
    def passed(self) -> bool:
        """True only if something was checked and nothing failed."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, numbers and strings, for json.dumps.

        What was not measured (NaN) is None, an infinite number the string "inf".
        """
        raise NotImplementedError

    def raise_if_failed(self) -> None:
        """Raises LeakError, with the report as its message, unless the report passed."""
        if not self.passed:
            raise LeakError(self)

    def __repr__(self) -> str:
        return str(self)

    def __bool__(self) -> bool:
        # `if report:` and `assert report` read like questions about the verdict; a dataclass would always say True.
        return self.passed


Spans = tuple[tuple[int, int], ...]  # of each document: its first row, and one past its last


def spans_of(lengths: Iterable[int]) -> Spans:
    """Documents of these lengths, one after the other."""
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return tuple(spans)


class RowNames:
    """Names rows of the token axis by document: "document 2, token 3 (row 11)"; rows in no document are padding.

    word: what a row is called in the parentheses.
    """

    def __init__(self, documents: Spans, word: str = "row") -> None:
        self.word = word
        self.starts = [start for start, _ in documents]
        self.document = {row: number for number, span in enumerate(documents) for row in range(*span)}

    def document_of(self, row: int) -> int:
        """Number of the row's document, -1 for padding."""
        return self.document.get(row, -1)

    def __call__(self, row: int) -> str:
        document = self.document_of(row)
        if document < 0:
            return f"padding ({self.word} {row})"
        return f"document {document}, token {row - self.starts[document]} ({self.word} {row})"


def difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """|new - old| in float64, exactly 0 where the two are equal (NaN equals NaN, -0 equals 0); never NaN.

    A finite value that became NaN, or the reverse, counts as infinite.
    """
    if new.device.type == "mps":  # which has no float64
        new, old = new.cpu(), old.cpu()
    same = (new == old) | (new.isnan() & old.isnan())
    moved = (new.double() - old.double()).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
    return moved.masked_fill_(same, 0.0)


def rows_moved(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [T, V]: the largest `difference` in every row, float64 [T], and how many entries differ, int64 [T]; on the CPU.

    A block of rows at a time: the logits of a large vocabulary are too much to hold several times in float64.
    """
    block = max(1, 2**22 // max(1, new.shape[-1]))
    sizes, counts = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for part, before in zip(new.split(block), old.split(block), strict=True):
        moved = difference(part, before)
        sizes.append(moved.amax(-1).cpu())
        counts.append((moved != 0).sum(-1).cpu())
    return torch.cat(sizes), torch.cat(counts)


def magnitude(value: float) -> str:
    """A magnitude in text: exact zero is "0", so that it cannot be taken for a rounded small number."""
    if value == 0:
        return "0"
    return f"{value:.3g}"


def plain(value: Any) -> Any:
    """Tensors, tuples and numbers as JSON can hold them: NaN (not measured) becomes None, infinity a string."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else (None if math.isnan(value) else str(value))
    return value


def table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of a text table: the first column left-aligned, the others right-aligned."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        first, *others = row
        aligned = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append((indent + "  ".join(aligned)).rstrip())
    lines.insert(1, indent + "  ".join("-" * width for width in widths))
    return lines


def plural(count: int, noun: str) -> str:
    """ "1 key", "2 keys"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
