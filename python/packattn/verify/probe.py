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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..packing import Packing
from .probe_report import ProbeLeak, ProbeReport
from .report import RowNames, difference, dtype_name, magnitude

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
    tokens = _check_documents(documents)
    if device is None:
        device = _device_of(model, tokens)
    device = torch.device(device)
    tokens = [document.to(device) for document in tokens]
    lengths = [document.numel() for document in tokens]
    present = [index for index, length in enumerate(lengths) if length]
    replaced = _replacements(tokens, replacement, seed)
    hooked = embedding if embedding is not None else _find_embedding(model)

    steps = 2 + 2 * len(present) + (len(present) if backward is not False else 0)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    packing = Packing.from_lengths(lengths, device=device)
    forward = _Forward(model, run)
    problems: list[str] = []
    with _quiet(model, device):
        with torch.no_grad():
            row = torch.cat(tokens)
            base = forward(row, packing)
            step()
            noise = difference(forward(row, packing), base)
            step()
            deterministic = not bool((noise != 0).any())
            if not base.isfinite().all():
                problems.append("the logits are not finite")
            parts = base.split(lengths)

            error, relative = (
                torch.zeros(len(lengths), dtype=torch.float64),
                torch.zeros(len(lengths), dtype=torch.float64),
            )
            for index in present:
                alone = forward(tokens[index], Packing.from_lengths([lengths[index]], device=device))
                moved = difference(parts[index], alone)
                error[index] = moved.max()
                relative[index] = moved.max() / alone.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
                step()

            shape = (len(lengths), len(lengths))
            influence = torch.zeros(shape, dtype=torch.float64)
            changed = torch.zeros(shape, dtype=torch.int64)
            worst_row = torch.zeros(shape, dtype=torch.int64)
            if deterministic:
                for source in present:
                    moved = difference(forward(_with(tokens, source, replaced[source]), packing), base)
                    for document, part in enumerate(moved.split(lengths)):
                        if part.numel():
                            influence[source, document] = part.max()
                            changed[source, document] = (part != 0).sum()
                            worst_row[source, document] = part.amax(-1).argmax() + sum(lengths[:document])
                    if influence[source, source] == 0:
                        problems.append(
                            f"replacing document {source} does not change its own logits: nothing can be observed"
                        )
                    step()
            else:
                influence.fill_(math.nan)
                problems.append(
                    f"the model is not deterministic: two runs on the same input differ by {magnitude(noise.max().item())} "
                    "(dropout outside of eval mode, or state kept between calls?); a leak cannot be told from that"
                )

        gradient, key_rows, reason = None, None, "not checked (backward=False)"
        if backward is not False and not deterministic:
            reason = "not checked, the model is not deterministic"
        elif backward is not False:
            gradient, key_rows, reason, grad_error = _gradients(
                forward, hooked, row, packing, lengths, base, seed, step
            )
            if gradient is None and backward:
                problems.append(f"the backward was asked for and was {reason}")
            limit = tolerance if tolerance is not None else _tolerance_of(base.dtype)
            if not grad_error <= limit:
                problems.append(
                    f"with gradients enabled the model gives other logits: relative difference {magnitude(grad_error)} "
                    f"(allowed {magnitude(limit)})"
                )

        leaks: list[ProbeLeak] = []
        pairs = [
            (source, document)
            for source in present
            for document in present
            if source != document
            and (influence[source, document] > 0 or (gradient is not None and gradient[source, document] > 0))
        ]
        pairs.sort(key=lambda pair: -influence[pair].item())
        names = RowNames(lengths)
        for position, (source, document) in enumerate(pairs):
            size = influence[source, document].item()
            at = int(worst_row[source, document])
            key, key_size = None, None
            if size > 0 and position < locate:
                with torch.no_grad():
                    key, key_size = _locate(forward, tokens, source, replaced[source], packing, base, at)
            grad = None if gradient is None else gradient[source, document].item()
            if size == 0 and key_rows is not None:
                key = int(key_rows[source, document])
            leaks.append(
                ProbeLeak(
                    document=document,
                    source=source,
                    size=size,
                    changed=int(changed[source, document]),
                    row=at,
                    key_row=key,
                    key_size=key_size,
                    gradient=grad,
                    text=_words(names, source, document, size, at, key, key_size, grad),
                )
            )

    return ProbeReport(
        lengths=tuple(lengths),
        dtype=base.dtype,
        tolerance=tolerance if tolerance is not None else _tolerance_of(base.dtype),
        error=error,
        relative_error=relative,
        influence=influence,
        changed=changed,
        gradient=gradient,
        backward=reason,
        deterministic=deterministic,
        leaks=tuple(leaks),
        problems=tuple(problems),
    )


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
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, torch.nn.Module) else []
    accelerator = device.type if device.type != "cpu" else "cuda"
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=accelerator):
        try:
            if modes:
                model.eval()
            yield
        finally:
            # Each module's own flag: train(True) on the whole would thaw what the user had put in eval mode.
            for module, training in modes:
                module.training = training


def _gradients(
    forward: _Forward,
    embedding: torch.nn.Module | None,
    row: torch.Tensor,
    packing: Packing,
    lengths: list[int],
    base: torch.Tensor,
    seed: int,
    step: Callable[[], None],
) -> tuple[torch.Tensor | None, torch.Tensor | None, str, float]:
    """Gradient of every document's logits with respect to every document's embeddings.

    Returns [N, N] largest gradients (source, document), the row of the source where it is largest, what was done, and
    the relative difference of the logits from those without gradients. One forward per document instead of one graph
    kept for all: compiled models free their buffers after one backward.
    """
    if embedding is None:
        return None, None, "not checked, no input embedding found (pass embedding=)", 0.0
    count, total = len(lengths), sum(lengths)
    gradient = torch.zeros(count, count, dtype=torch.float64)
    rows = torch.zeros(count, count, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    captured: list[torch.Tensor] = []
    worst = 0.0

    def capture(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor):
            return None
        # A leaf of its own, so that a frozen model can be checked and no parameter gets a gradient.
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
                    return None, None, f"not checked, the embedding gave no [.., {total}, E] ({shapes})", worst
                if not logits.requires_grad:
                    return None, None, "not checked, the logits do not depend on the embedding differentiably", worst
                scale = base.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
                worst = max(worst, (difference(logits.detach(), base).max() / scale).item())
                start = sum(lengths[:document])
                part = logits[start : start + length]
                # Random weights instead of a loss: every logit of the document counts, the last token's too.
                weights = torch.randn(part.shape, generator=generator).to(part)
                grads = torch.autograd.grad((part * weights).sum(), seen, allow_unused=True)
            reach = torch.zeros(total, dtype=torch.float64, device=row.device)
            for grad in grads:
                if grad is not None:
                    size = grad.double().abs().nan_to_num(nan=math.inf).amax(-1).reshape(-1, total).amax(0)
                    reach = torch.maximum(reach, size)
            for source, part_of in enumerate(reach.split(lengths)):
                if part_of.numel():
                    gradient[source, document] = part_of.max()
                    rows[source, document] = part_of.argmax() + sum(lengths[:source])
            if gradient[document, document] == 0:
                return None, None, f"not checked, no gradient reaches the embeddings of document {document}", worst
            step()
    finally:
        handle.remove()
    return gradient, rows, "checked", worst


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
    gradient: float | None,
) -> str:
    if size == 0:
        seen = f"document {source}" if key is None else names(key)
        return (
            f"document {document} sees {seen} in the backward only: {magnitude(gradient or 0.0)} is the gradient of its "
            "logits with respect to that embedding"
        )
    if key is None or key_size is None:
        return (
            f"{names(row)} sees document {source}: {magnitude(size)} is what its logits move by when that is replaced"
        )
    return (
        f"{names(row)} sees {names(key)}: {magnitude(key_size)} is what its logits move by when that token is replaced "
        f"({magnitude(size)} with all of document {source})"
    )


def _tolerance_of(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 6e-2)
