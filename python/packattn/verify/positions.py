"""check_positions: do positions restart in every document?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..packing import Packing
from .report import Report, dtype_name, plain, plural

_SHOWN = 8  # faults that a text names


@dataclasses.dataclass(frozen=True)
class PositionFault:
    """A token with a wrong position: its row, its document, which token of it, and the two positions."""

    row: int
    document: int
    token: int
    got: int
    wanted: int

    @property
    def text(self) -> str:
        """The fault in words."""
        return (
            f"document {self.document}, token {self.token} (row {self.row}) has position {self.got}, "
            f"wanted {self.wanted}"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class PositionReport(Report):
    """What check_positions found.

    Attributes:
        lengths: tokens of each document.
        checked: tokens whose position was compared, those of documents; the positions of padding may be anything.
        wrong: how many are wrong.
        documents_wrong: in how many documents.
        faults: the first wrong token of each of those documents, in order.
        start: the position a document must begin with.
    """

    lengths: tuple[int, ...]
    checked: int
    wrong: int
    documents_wrong: int
    faults: tuple[PositionFault, ...]
    start: int

    @property
    def first(self) -> PositionFault | None:
        """The first wrong token of the row."""
        return self.faults[0] if self.faults else None

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.wrong == 0

    def to_dict(self) -> dict[str, Any]:
        faults = [dataclasses.asdict(fault) | {"text": fault.text} for fault in self.faults]
        result: dict[str, Any] = plain(
            dataclasses.asdict(self) | {"check": "check_positions", "passed": self.passed, "faults": faults}
        )
        return result

    def __str__(self) -> str:
        documents = plural(sum(length > 0 for length in self.lengths), "document")
        lines = [f"positions: {'passed' if self.passed else 'FAILED'}"]
        lines.append(f"  {plural(self.checked, 'token')} of {documents}: {self.wrong} wrong, in {self.documents_wrong}")
        if self.faults:
            lines.append("")
            lines += [f"  - {fault.text}" for fault in self.faults[:_SHOWN]]
            if self.documents_wrong > _SHOWN:
                lines.append(f"  - and in {plural(self.documents_wrong - _SHOWN, 'more document')}")
        return "\n".join(lines)


def check_positions(
    position_ids: Tensor | Callable[[Packing], Tensor],
    packing: Packing | Sequence[int],
    *,
    start: int = 0,
) -> PositionReport:
    """Checks that positions begin anew in every document and go up by 1 inside it.

    Args:
        position_ids: integer positions [T] or [B, S] with B * S == T, or a function of the packing that returns them.
        packing: where the documents lie, or their lengths.
        start: the position of a document's first token.

    Returns:
        A PositionReport, which names the first wrong token of every document. What padding has is not looked at.

    Raises:
        TypeError: positions that are no integer tensor.
        ValueError: positions of another number of tokens, 3-D positions (choose a plane of mRoPE positions first), or
            a packing without any document's token, where there is nothing to check.
    """
    if not isinstance(packing, Packing):
        packing = Packing.from_lengths(list(packing))
    positions = position_ids if isinstance(position_ids, Tensor) else position_ids(packing)
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"position_ids must be a tensor, or a function that returns one, got {type(positions).__name__}"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"position_ids must be integers, got {dtype_name(positions.dtype)}")
    if positions.dim() == 3:
        raise ValueError(f"position_ids is 3-D {list(positions.shape)} (several planes, as for mRoPE): pass one plane")
    if positions.dim() not in (1, 2) or positions.numel() != packing.total:
        raise ValueError(
            f"position_ids must be [T] or [B, S] with the packing's {packing.total} tokens, got {list(positions.shape)}"
        )
    got = positions.reshape(-1).cpu().long()
    faults, wrong, checked = [], 0, 0
    lengths = []
    for document, rows in enumerate(packing.documents()):
        length = rows.stop - rows.start
        lengths.append(length)
        checked += length
        here = got[rows]
        wanted = torch.arange(start, start + length)
        bad = (here != wanted).nonzero().flatten()
        wrong += bad.numel()
        if bad.numel():
            token = int(bad[0])
            faults.append(PositionFault(rows.start + token, document, token, int(here[token]), int(wanted[token])))
    if checked == 0:
        raise ValueError("packing holds no document with tokens: there are no positions to check")
    return PositionReport(
        lengths=tuple(lengths),
        checked=checked,
        wrong=wrong,
        documents_wrong=len(faults),
        faults=tuple(faults),
        start=start,
    )
