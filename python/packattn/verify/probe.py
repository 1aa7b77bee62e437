"""probe: does a whole model keep packed documents apart?

Three measurements on one packed row, none of which needs to know how the model is built:

1. each document alone against the same document in the row: the logits must agree within a tolerance;
2. each document in turn is replaced by other tokens of the same length: the logits of every other document must not
   change at all, in no bit that matters (a changed zero sign or NaN payload is no change);
3. the same in the backward: the gradient of one document's logits with respect to the input embeddings of every other
   document must be exactly zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from packattn.packing import Packing
from packattn.verify.report import Report, RowNames, difference, number, plain, plural, table

Run = Callable[[Any, torch.Tensor, Packing], Any]
Replacement = Callable[[torch.Tensor, int], torch.Tensor]

# Largest error of packed against alone, relative to the largest logit of the document. The two runs multiply matrices
# of different shapes, so they round differently in every layer; a document seen wrongly is off by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclasses.dataclass(frozen=True)
class ProbeLeak:
    """One document seen from another.

    document: whose logits moved; source: the document that was replaced. size: largest change of the logits.
    changed: logits that changed. row: the row of `document` that moved most. key_row: the row of `source` that moves
    it, found by replacing fewer and fewer tokens, and key_size by how much (None where it was not looked for or no
    smaller set of tokens moves the row). gradient: largest gradient of `document`'s logits with respect to `source`'s
    embeddings (None where not checked). text: all of it in words.
    """

    document: int
    source: int
    size: float
    changed: int
    row: int
    key_row: int | None
    key_size: float | None
    gradient: float | None
    text: str


@dataclasses.dataclass(frozen=True)
class ProbeReport(Report):
    """What probe found, for N documents in one row.

    lengths: tokens of each document. dtype: of the logits.
    error, relative_error: float64 [N], largest difference between a document's logits packed and alone, absolute and
        relative to its largest logit; 0 for a document without tokens. tolerance: what relative_error may be.
    influence: float64 [N, N], influence[a, b] = largest change of b's logits when a is replaced. Off the diagonal it
        must be exactly 0; on it, it must not be (the model answers to its input).
    changed: int64 [N, N], how many logits changed.
    gradient: float64 [N, N] or None, gradient[a, b] = largest gradient of b's logits with respect to a's input
        embeddings; None where it was not checked, and `backward` says why.
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


def probe(
    model: Any,
    documents: Sequence[torch.Tensor],
    *,
    run: Run | None = None,
    embedding: torch.nn.Module | None = None,
    device: torch.device | str | None = None,
    backward: bool | None = None,
    tolerance: float | None = None,
    replacement: Replacement | None = None,
    seed: int = 0,
    locate: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> ProbeReport:
    """Checks that a model gives packed documents the logits they have alone, and that none sees another.

    model: an nn.Module or any callable. documents: int64 [length] token ids each, at least two of them not empty.
    run(model, input_ids [1, T], packing): one forward, returns logits [1, T, V] or [T, V], or an object with
        `.logits` (or `.last_hidden_state`), or a tuple that begins with one of these. The default calls
        model(input_ids, position_ids=packing.position_ids[None], packing=packing). A document alone is run through
        the same function, with a packing of one document.
    embedding: the module whose output is the input embeddings; default model.get_input_embeddings() where it exists.
    device: where to run; default that of the model's parameters, or of the documents.
    backward: None checks the gradient where the embedding can be found; True makes it a failure if it cannot;
        False leaves it out.
    tolerance: of packed against alone, relative to the largest logit of the document; the default is chosen by dtype.
    replacement(document, number): other tokens, same shape and dtype. The default draws, for every position, another
        token among those that occur in `documents`.
    seed: of the replaced tokens. The random state of torch is left as it was.
    locate: for how many of the largest leaks the token that is seen is looked for (about 2 log2(length) runs each).
    progress(done, total): called after each step.

    The model is run in eval mode, every module's mode is restored afterwards; no parameter's `.grad` is touched.
    Costs about 3 N forwards and N backwards for N documents. Raises ValueError or TypeError for documents that
    cannot show anything; what the model does wrong is in the report.
    """
    raise NotImplementedError


def _off_diagonal(matrix: torch.Tensor) -> float:
    """Largest entry off the diagonal; NaN if there is one."""
    inside = torch.eye(matrix.shape[0], dtype=torch.bool)
    return float(matrix.masked_fill(inside, 0.0).max())
