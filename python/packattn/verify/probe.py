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

from .._modes import eval_mode
from ..packing import Packing
from .probe_report import ProbeLeak, ProbeReport
from .report import RowNames, difference, dtype_name, magnitude, rows_moved, spans_of

Run = Callable[[Any, torch.Tensor, Packing], Any]
Replacement = Callable[[torch.Tensor, int], torch.Tensor]

# Largest error of packed against alone, relative to the largest logit of the document. The two runs multiply matrices
# of different shapes, so they round differently in every layer; a document seen wrongly is off by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


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

    The model is run in eval mode; every module's mode is restored afterwards. No parameter's `.grad` and no random
    state is touched. N documents cost about 3 N forwards and N backwards.

    Args:
        model: an nn.Module, or any callable.
        documents: int64 or int32 [length] token ids each; at least two must not be empty.
        run: run(model, input_ids [1, T], packing) is one forward. It returns logits [1, T, V] or [T, V], an object with
            `.logits` (or `.last_hidden_state`), or a tuple that begins with the logits. A document alone is run by it
            too, with a packing of one document. The default calls
            model(input_ids, position_ids=packing.position_ids[None], packing=packing).
        embedding: the module whose output is the input embeddings; the default is model.get_input_embeddings().
        device: where to run; the default is the device of the model's parameters, or of the documents.
        backward: None checks gradients where the embedding can be found; True makes it a failure if they could not be
            checked; False leaves them out. The report says what was done.
        tolerance: largest error of packed against alone, relative to the largest logit of the document. The default
            follows from the dtype of the logits.
        replacement: replacement(document, number) gives other tokens of the same shape and dtype. The default draws,
            for every position, another token among those that occur in `documents`.
        seed: of the replaced tokens.
        locate: for how many of the largest leaks to look for the token that is seen (2 log2(length) forwards each).
        progress: progress(done, total) is called after every step.

    Returns:
        A ProbeReport. Comparisons of the leak are exact (NaN equals NaN, -0 equals 0).

    Raises:
        TypeError, ValueError: documents that can show nothing, or a run that returns no logits. What the model does
            wrong is in the report.
    """
    tokens = _check_documents(documents)
    device = torch.device(device) if device is not None else _device_of(model, tokens)
    tokens = [document.to(device) for document in tokens]
    lengths = [document.numel() for document in tokens]
    present = [index for index, length in enumerate(lengths) if length]
    replaced = _replacements(tokens, replacement, seed)
    hooked = embedding if embedding is not None else _find_embedding(model)
    row, packing = torch.cat(tokens), Packing.from_lengths(lengths, device=device)
    forward = _Forward(model, run)
    steps, done = 2 + len(present) * (2 if backward is False else 3), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    problems: list[str] = []
    with _quiet(model, device):
        with torch.no_grad():
            base = forward(row, packing)
            step()
            noise = rows_moved(forward(row, packing), base)[0].max().item()
            step()
            if base.isnan().any():
                problems.append("the logits hold NaN")
            error, relative = _alone(forward, tokens, base, step)
            found = _Influence(len(lengths))
            if noise == 0:
                found = _influence(forward, tokens, replaced, packing, base, step)
                if found.leaks():  # noise that is rare may look like a leak
                    noise = max(rows_moved(forward(row, packing), base)[0].max().item() for _ in range(3))
        limit = tolerance if tolerance is not None else _TOLERANCE.get(base.dtype, max(_TOLERANCE.values()))
        if noise:
            found = _Influence(len(lengths))
            problems.append(
                f"the model is not deterministic: runs on the same input differ by {magnitude(noise)} (dropout that eval "
                "mode does not switch off, or state kept from call to call?); a leak cannot be told from that"
            )
        else:
            problems += [
                f"replacing document {index} does not change its own logits: nothing can be observed"
                for index in present
                if found.size[index, index] == 0
            ]

        reach = _Reach(
            None, None, "not checked (backward=False)" if backward is False else "not checked, not deterministic"
        )
        if backward is not False and noise == 0:
            reach = _gradients(forward, hooked, row, packing, lengths, base, seed, step)
            if not reach.error <= limit:
                problems.append(
                    f"with gradients enabled the model gives other logits: relative difference {magnitude(reach.error)} "
                    f"(allowed {magnitude(limit)})"
                )
        if backward and reach.size is None:
            problems.append(f"the backward was to be checked, but was {reach.reason}")
        leaks = _leaks(forward, tokens, replaced, packing, base, found, reach, locate)
    if progress is not None and done < steps:  # what could not be checked took no steps
        progress(steps, steps)

    return ProbeReport(
        lengths=tuple(lengths),
        dtype=base.dtype,
        tolerance=limit,
        error=error,
        relative_error=relative,
        influence=found.size,
        changed=found.changed,
        gradient=reach.size,
        backward=reach.reason,
        deterministic=noise == 0,
        leaks=tuple(leaks),
        problems=tuple(problems),
    )


class _Influence:
    """What replacing one document does to another: [source, document]; NaN until it is measured."""

    def __init__(self, count: int) -> None:
        self.size = torch.full((count, count), math.nan, dtype=torch.float64)
        self.changed = torch.zeros(count, count, dtype=torch.int64)
        self.row = torch.zeros(count, count, dtype=torch.int64)  # of the document, that moves most

    def leaks(self) -> bool:
        return bool((self.size.masked_fill(torch.eye(len(self.size), dtype=torch.bool), 0.0) != 0).any())


@dataclasses.dataclass
class _Reach:
    """Gradients of one document's logits with respect to another's embeddings: [source, document]."""

    size: torch.Tensor | None
    row: torch.Tensor | None  # of the source, where the gradient is largest
    reason: str
    error: float = 0.0  # of the logits, relative, against those without gradients


def _alone(
    forward: _Forward, tokens: list[torch.Tensor], base: torch.Tensor, step: Callable[[], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest difference of each document's logits from those it has alone, absolute and relative: float64 [N]."""
    error = torch.zeros(len(tokens), dtype=torch.float64)
    relative = torch.zeros(len(tokens), dtype=torch.float64)
    parts = base.split([document.numel() for document in tokens])
    for index, document in enumerate(tokens):
        if document.numel():
            alone = forward(document, Packing.from_lengths([document.numel()], device=document.device))
            error[index] = rows_moved(parts[index], alone)[0].max()
            relative[index] = error[index] / _largest(alone)
            step()
    return error, relative


def _influence(
    forward: _Forward,
    tokens: list[torch.Tensor],
    replaced: list[torch.Tensor],
    packing: Packing,
    base: torch.Tensor,
    step: Callable[[], None],
) -> _Influence:
    """Replaces every document in turn."""
    lengths = [document.numel() for document in tokens]
    found = _Influence(len(tokens))
    found.size.zero_()
    for source, length in enumerate(lengths):
        if not length:
            continue
        size, changed = rows_moved(forward(_with(tokens, source, replaced[source]), packing), base)
        for document, (part, count) in enumerate(zip(size.split(lengths), changed.split(lengths), strict=True)):
            if part.numel():
                found.size[source, document] = part.max()
                found.changed[source, document] = count.sum()
                found.row[source, document] = part.argmax() + sum(lengths[:document])
        step()
    return found


def _leaks(
    forward: _Forward,
    tokens: list[torch.Tensor],
    replaced: list[torch.Tensor],
    packing: Packing,
    base: torch.Tensor,
    found: _Influence,
    reach: _Reach,
    locate: int,
) -> list[ProbeLeak]:
    """Every pair of documents of which one sees the other, the largest first."""
    count = len(tokens)
    moved = found.size.nan_to_num(nan=0.0)
    gradient = torch.zeros_like(moved) if reach.size is None else reach.size
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and (moved[a, b] > 0 or gradient[a, b] > 0)]
    pairs.sort(key=lambda pair: (-moved[pair].item(), -gradient[pair].item()))
    names = RowNames(spans_of(document.numel() for document in tokens))
    leaks = []
    for position, (source, document) in enumerate(pairs):
        size, row = moved[source, document].item(), int(found.row[source, document])
        key, key_size = None, None
        if size > 0 and position < locate:
            with torch.no_grad():
                key, key_size = _locate(forward, tokens, source, replaced[source], packing, base, row)
        elif size == 0 and reach.row is not None:
            key = int(reach.row[source, document])
        leaks.append(
            ProbeLeak(
                document=document,
                source=source,
                size=size,
                changed=int(found.changed[source, document]),
                row=row if size > 0 else None,
                key_row=key,
                key_size=key_size,
                gradient=None if reach.size is None else gradient[source, document].item(),
                text=_words(names, source, document, size, row, key, key_size, gradient[source, document].item()),
            )
        )
    return leaks


class _Forward:
    """Calls run and finds the logits in what it returns: [T, V]."""

    def __init__(self, model: Any, run: Run | None) -> None:
        self.model = model
        self.run = run if run is not None else _default_run

    def __call__(self, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        result = self.run(self.model, tokens[None], packing)
        if not isinstance(result, torch.Tensor):
            for name in ("logits", "last_hidden_state"):
                found = result.get(name) if isinstance(result, dict) else getattr(result, name, None)
                if isinstance(found, torch.Tensor):
                    result = found
                    break
            else:
                if isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor):
                    result = result[0]
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"run must return logits or an object with .logits, got {type(result).__name__}")
        total = tokens.numel()
        if result.dim() == 3 and result.shape[0] == 1:
            result = result[0]
        if result.dim() != 2 or result.shape[0] != total or not result.is_floating_point():
            raise ValueError(
                f"run must return floating-point logits [1, {total}, V] or [{total}, V] for {total} tokens, got "
                f"{dtype_name(result.dtype)} {list(result.shape)}"
            )
        return result


def _default_run(model: Any, input_ids: torch.Tensor, packing: Packing) -> Any:
    return model(input_ids, position_ids=packing.position_ids[None], packing=packing)


def _check_documents(documents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tokens = list(documents)
    for index, document in enumerate(tokens):
        if not isinstance(document, torch.Tensor):
            raise TypeError(f"documents[{index}] must be a tensor of token ids, got {type(document).__name__}")
        if document.dim() != 1:
            raise ValueError(f"documents[{index}] must be 1-D [length], got shape {list(document.shape)}")
        if document.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"documents[{index}] must be int64 or int32, got {dtype_name(document.dtype)}")
    filled = sum(document.numel() > 0 for document in tokens)
    if filled < 2:
        raise ValueError(
            f"documents must hold at least two documents with tokens, got {filled}: a leak can only be seen between two"
        )
    if len({document.dtype for document in tokens}) > 1:
        raise TypeError("documents must all have the same dtype")
    return [document.detach() for document in tokens]


def _replacements(tokens: list[torch.Tensor], replacement: Replacement | None, seed: int) -> list[torch.Tensor]:
    """Other tokens for every document, the same shape."""
    if replacement is not None:
        made = [replacement(document, index) for index, document in enumerate(tokens)]
        for index, (new, old) in enumerate(zip(made, tokens, strict=True)):
            if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                got = (
                    f"{dtype_name(new.dtype)} {list(new.shape)}"
                    if isinstance(new, torch.Tensor)
                    else type(new).__name__
                )
                raise ValueError(
                    f"replacement must return {dtype_name(old.dtype)} {list(old.shape)} for document {index}, got {got}"
                )
            if old.numel() and torch.equal(new.to(old.device), old):
                raise ValueError(f"replacement returned document {index} unchanged")
        return [new.to(old.device) for new, old in zip(made, tokens, strict=True)]
    vocabulary = torch.cat(tokens).unique()
    if vocabulary.numel() < 2:
        raise ValueError(
            "documents hold one token id only, so there is nothing to replace it with: pass replacement=, a function "
            "(document, number) -> other tokens"
        )
    generator = torch.Generator().manual_seed(seed)
    made = []
    for document in tokens:
        # Never the token itself: 1 .. size-1 places further on among the ids that occur.
        shift = torch.randint(1, vocabulary.numel(), (document.numel(),), generator=generator).to(document.device)
        made.append(vocabulary[(torch.searchsorted(vocabulary, document) + shift) % vocabulary.numel()])
    return made


def _with(tokens: list[torch.Tensor], index: int, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([*tokens[:index], new, *tokens[index + 1 :]])


def _device_of(model: Any, tokens: list[torch.Tensor]) -> torch.device:
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return tokens[0].device


def _find_embedding(model: Any) -> torch.nn.Module | None:
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, torch.nn.Module) else None


@contextlib.contextmanager
def _quiet(model: Any, device: torch.device) -> Iterator[None]:
    """Eval mode and torch's random state, both as they were afterwards."""
    devices = [device] if device.type in ("cuda", "xpu") else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"), eval_mode(model):
        yield


def _gradients(
    forward: _Forward,
    embedding: torch.nn.Module | None,
    row: torch.Tensor,
    packing: Packing,
    lengths: list[int],
    base: torch.Tensor,
    seed: int,
    step: Callable[[], None],
) -> _Reach:
    """Gradient of every document's logits with respect to every document's embeddings.

    One forward per document instead of one graph kept for all: compiled models free their buffers after a backward.
    """
    if embedding is None:
        return _Reach(None, None, "not checked, no input embedding found (pass embedding=)")
    count, total = len(lengths), sum(lengths)
    size = torch.zeros(count, count, dtype=torch.float64)
    rows = torch.zeros(count, count, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    captured: list[torch.Tensor] = []
    error = 0.0

    def capture(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor):
            return None
        # A leaf of its own, so that a frozen model can be checked too and no parameter gets a gradient.
        leaf = output.detach().requires_grad_(True)
        captured.append(leaf)
        return leaf

    handle = embedding.register_forward_hook(capture)
    try:
        for document, length in enumerate(lengths):
            if not length:
                continue
            captured.clear()
            with torch.enable_grad():
                logits = forward(row, packing)
                seen = [leaf for leaf in captured if leaf.dim() >= 2 and leaf.shape[-2] == total]
                if not seen:
                    shapes = ", ".join(str(list(leaf.shape)) for leaf in captured) or "it was not called"
                    return _Reach(None, None, f"not checked, the embedding gave no [.., {total}, E] ({shapes})", error)
                if not logits.requires_grad:
                    return _Reach(None, None, "not checked, the logits have no gradient to the embedding", error)
                start = sum(lengths[:document])
                part = logits[start : start + length]
                # Random weights instead of a loss: every logit of the document counts, the last token's too.
                weights = torch.randn(part.shape, generator=generator).to(part)
                grads = torch.autograd.grad((part * weights).sum(), seen, allow_unused=True)
            error = max(error, (rows_moved(logits.detach(), base)[0].max() / _largest(base)).item())
            reached = torch.zeros(total, dtype=torch.float64)
            for grad in grads:
                if grad is not None:
                    largest = grad.double().abs().nan_to_num(nan=math.inf).amax(-1).reshape(-1, total).amax(0)
                    reached = torch.maximum(reached, largest.cpu())
            for source, there in enumerate(reached.split(lengths)):
                if there.numel():
                    size[source, document] = there.max()
                    rows[source, document] = there.argmax() + sum(lengths[:source])
            if size[document, document] == 0:
                return _Reach(None, None, f"not checked, document {document} has no gradient to its embeddings", error)
            step()
    finally:
        handle.remove()
    return _Reach(size, rows, "checked", error)


def _largest(logits: torch.Tensor) -> float:
    """The largest finite magnitude, never 0 (it divides)."""
    largest = max((part.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for part in logits.split(256)), default=0.0)
    return max(largest, torch.finfo(torch.float64).tiny)


def _locate(
    forward: _Forward,
    tokens: list[torch.Tensor],
    source: int,
    new: torch.Tensor,
    packing: Packing,
    base: torch.Tensor,
    at: int,
) -> tuple[int | None, float | None]:
    """The token of `source` whose replacement moves row `at`, by halving; None where both halves leave it alone."""
    old = tokens[source]
    start = sum(document.numel() for document in tokens[:source])
    low, high, size = 0, old.numel(), None
    if high == 1:
        return start, difference(forward(_with(tokens, source, new), packing)[at], base[at]).max().item()
    while high - low > 1:
        middle = (low + high) // 2
        moves = []
        for first, last in ((low, middle), (middle, high)):
            trial = old.clone()
            trial[first:last] = new[first:last]
            moves.append(difference(forward(_with(tokens, source, trial), packing)[at], base[at]).max().item())
        if max(moves) == 0:
            return None, None
        low, high = (low, middle) if moves[0] >= moves[1] else (middle, high)
        size = max(moves)
    return start + low, size


def _words(
    names: RowNames,
    source: int,
    document: int,
    size: float,
    row: int,
    key: int | None,
    key_size: float | None,
    gradient: float,
) -> str:
    if size == 0:
        seen = f"document {source}" if key is None else names(key)
        how = "gradient of its logits with respect to that embedding; in the backward only"
        return f"document {document} sees {seen}: {magnitude(gradient)} ({how})"
    if key is None or key_size is None:
        return f"{names(row)} sees document {source}: {magnitude(size)} (change of its logits when that is replaced)"
    return (
        f"{names(row)} sees {names(key)}: {magnitude(key_size)} (change of its logits when that token is replaced; "
        f"{magnitude(size)} when all of document {source} is)"
    )
