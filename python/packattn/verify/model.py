"""check_model: how does a transformers model pack, for every way of calling it and every attention implementation?

Three measurements of a packed row, none of which knows how the model is built, so that hybrid and windowed models are
judged by the same rule: what does replacing one document do to the others (it must be nothing), do positions restart,
and are the logits those of the documents alone?
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._modes import eval_mode
from ..packing import Packing
from .model_report import KeyInfluence, ModelReport, WayReport
from .positions import check_positions
from .report import difference, rows_moved, spans_of
from .ways import NO_CACHE, OTHER_LAYERS, OTHER_POSITIONS, PACKATTN, WAYS, Arguments, Way

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "packattn")
# Largest error of packed against alone, relative to the largest logit of the document (other matrix shapes round
# differently in every layer).
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# What the grouping of tokens by a router may move in a mixture of experts, relative to the largest logit.
_ROUNDING = 1e-5
# What a key must move alone, relative to the largest logit, to be missed where it moves nothing packed.
_FELT = 1e-4


def check_model(
    model: Any,
    documents: Sequence[Tensor] | None = None,
    *,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    ways: Sequence[Way] = WAYS,
    tolerance: float | None = None,
    seed: int = 0,
    keys: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelReport:
    """Checks how a transformers model packs.

    Args:
        model: a Hugging Face PreTrainedModel; its attention implementation, modes and hooks are as before afterwards.
        documents: token ids, int64 [length] each, at least two; drawn at random by default.
        implementations: attention implementations to compare. "packattn" is registered and used as it is meant to be,
            with :func:`packattn.integrations.transformers.prepare`.
        ways: how the model is called.
        tolerance: of packed against alone, relative to the largest logit of the document.
        keys: also find which query sees which key, token by token, for the documents alone and, of every implementation,
            for its first way and the one that leaks most. A forward for each token of each.
        progress(done, total): called after each way.

    Returns:
        a ModelReport with one row for each implementation and way. What an implementation cannot run is "not run".

    Raises:
        ImportError: transformers is missing.
        TypeError: not a transformers model.
        ValueError: fewer than two documents.
    """
    import transformers

    from ..integrations import transformers as hf

    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"check_model: model must be a transformers PreTrainedModel, got {type(model).__name__}")
    tokens = _documents(model, documents, seed)
    implementations = (implementations,) if isinstance(implementations, str) else tuple(implementations)
    hf.register()
    total, done = len(implementations) * len(ways), 0
    rows: list[WayReport] = []
    seen: list[KeyInfluence] = []
    limit = tolerance if tolerance is not None else _TOLERANCE.get(model.dtype, 1e-1)
    before = model.config._attn_implementation
    with _quiet(model), _implementation_restored(model):
        for name in implementations:
            remove: Callable[[], None] | None = None
            try:
                model.set_attn_implementation(name)
                for config in (model.config, model.config.get_text_config()):
                    if config._attn_implementation != name and name != before:  # transformers only logs it
                        raise ValueError(f"{type(model).__name__} cannot change its attention implementation")
                if name == "packattn":
                    remove = hf.prepare(model)
                alone = [_logits(model(d[None], **_accepted(model, NO_CACHE)))[0] for d in tokens]
                if any(bool(a.isnan().any()) for a in alone):
                    raise ValueError("the logits of the documents alone are NaN: nothing can be learnt from them")
            except Exception as error:  # noqa: BLE001  (whatever a model raises is its answer)
                rows += [_not_run(name, way.name, error) for way in ways]
                done += len(ways)
                if progress is not None:
                    progress(done, total)
                continue
            else:
                here: list[WayReport] = []
                for way in ways:
                    try:
                        here.append(_try(model, name, way, tokens, alone, limit, seed))
                    except Exception as error:  # noqa: BLE001
                        here.append(_not_run(name, way.name, error))
                    done += 1
                    if progress is not None:
                        progress(done, total)
                rows += _mend(here)
                if keys:
                    seen += _keys(model, name, ways, here, tokens, seed)
            finally:
                if remove is not None:
                    remove()
    lengths = tuple(d.numel() for d in tokens)
    return ModelReport(type(model).__name__, lengths, limit, tuple(rows), tuple(seen))


def _mend(rows: list[WayReport]) -> list[WayReport]:
    """Advice that holds: where the plainest call fails too, no other call of this implementation helps."""
    if not rows or rows[0].passed or rows[0].verdict == "not run":
        return rows

    def note(row: WayReport) -> str:
        if row.implementation != "packattn":
            return PACKATTN
        return OTHER_LAYERS if row.leak else OTHER_POSITIONS

    return [row if row.passed or row.verdict == "not run" else dataclasses.replace(row, note=note(row)) for row in rows]


def _documents(model: Any, documents: Sequence[Tensor] | None, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        raise ValueError(f"check_model: {type(model).__name__} has no vocabulary; it does not take rows of tokens")
    if documents is None:
        lengths = (7, 12, 1, 9)
        documents = [torch.randint(min(3, vocabulary - 2), vocabulary, (n,), generator=generator) for n in lengths]
    try:
        tokens = [d for d in map(torch.as_tensor, documents) if d.numel()]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"check_model: documents must be tensors of token ids, got {type(documents).__name__}"
        ) from error
    for number, d in enumerate(tokens):
        if d.dim() != 1 or d.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"check_model: documents[{number}] must be int64 [length], got {d.dtype} {list(d.shape)}")
        if int(d.min()) < 0 or int(d.max()) >= vocabulary:
            raise ValueError(
                f"check_model: documents[{number}] must hold tokens of 0 to {vocabulary - 1}, got {d.tolist()[:20]}"
            )
    if len(tokens) < 2:
        raise ValueError(f"check_model: documents must hold at least two with tokens, got {len(tokens)}")
    if torch.cat(tokens).unique().numel() < 2:  # one is replaced by others of these tokens, to see what it moves
        raise ValueError(
            f"check_model: documents must hold at least two different tokens, got only {int(tokens[0][0])}"
        )
    return [d.to(model.device).long() for d in tokens]


@contextlib.contextmanager
def _quiet(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and no warning that the calls contradict themselves: they do so on purpose."""
    said = set(_library._warned)
    try:
        with eval_mode(model), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "packattn: the batch is packed", RuntimeWarning)
            yield
    finally:  # what is said about that once must still come in real use
        _library._warned.intersection_update(said)


@contextlib.contextmanager
def _implementation_restored(model: Any) -> Iterator[None]:
    """The attention implementation of every config of the model as it was: towers may each have their own."""
    from transformers import PreTrainedConfig

    found: list[Any] = []

    def collect(config: Any) -> None:
        found.append(config)
        for name in getattr(config, "sub_configs", {}):
            inner = getattr(config, name, None)
            if isinstance(inner, PreTrainedConfig):
                collect(inner)

    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and all(config is not other for other in found):
            collect(config)
    saved = [(config, config._attn_implementation) for config in found]
    try:
        yield
    finally:
        # Setting one sets those inside it: the outer ones first, and a config that is inside several after all of them.
        for number, (config, name) in enumerate(saved):
            if all(config is not later for later, _ in saved[number + 1 :]):
                config._attn_implementation = name


def _not_run(implementation: str, way: str, error: Exception) -> WayReport:
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
    return WayReport(implementation, way, "not run", math.nan, math.nan, math.nan, "-", reason)


def _accepted(model: Any, arguments: Arguments) -> Arguments:
    """Encoders take no use_cache."""
    import inspect

    if "use_cache" in arguments and "use_cache" not in inspect.signature(model.forward).parameters:
        return {k: v for k, v in arguments.items() if k != "use_cache"}
    return arguments


def _logits(out: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        found = getattr(out, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(f"the model must return logits or last_hidden_state, got {type(out).__name__}")


class _Batch:
    """The documents as one way of calling packs them: run() gives the logits of each place they stand at."""

    def __init__(self, model: Any, way: Way, tokens: list[Tensor]) -> None:
        from ..integrations.transformers import first_position

        self.model, self.tokens = model, tokens
        device, lengths = tokens[0].device, [d.numel() for d in tokens]
        row = sum(lengths) + way.tail
        # The second row holds the documents the other way round, so that rows of a batch are packed differently.
        orders = [list(range(len(tokens))), list(reversed(range(len(tokens))))][: way.rows]
        self.shape = (len(orders), row)
        ids = torch.full(self.shape, -1, dtype=torch.int64, device=device)
        self.where: list[tuple[int, int, int]] = []  # (document, batch row, first token)
        for b, order in enumerate(orders):
            start = 0
            for document in order:
                ids[b, start : start + lengths[document]] = len(self.where)
                self.where.append((document, b, start))
                start += lengths[document]
        self.packing = Packing.from_segment_ids(ids, pad_id=-1)
        self.first = first_position(model)
        arguments = _accepted(model, way.arguments(self.packing, self.shape))
        if self.first and "position_ids" in arguments:
            arguments = {**arguments, "position_ids": arguments["position_ids"] + self.first}
        self.arguments = arguments
        pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
        self.ids = torch.full(self.shape, pad, dtype=torch.int64, device=device)
        for document, b, start in self.where:
            self.ids[b, start : start + lengths[document]] = tokens[document]

    def run(self, place: int = 0, other: Tensor | None = None) -> list[Tensor]:
        """other: tokens instead of those of the document at a place."""
        batch = self.ids
        if other is not None:
            _, b, start = self.where[place]
            batch = batch.clone()
            batch[b, start : start + other.numel()] = other
        out = _logits(self.model(batch, **self.arguments))
        return [out[b, start : start + self.tokens[document].numel()] for document, b, start in self.where]


def _try(
    model: Any, implementation: str, way: Way, tokens: list[Tensor], alone: list[Tensor], limit: float, seed: int
) -> WayReport:
    batch = _Batch(model, way, tokens)
    with _watched(model) as seen:
        base = batch.run()
    error = relative = leak = 0.0
    for got, (document, _, _) in zip(base, batch.where, strict=True):
        moved = float(difference(got, alone[document]).max())
        error = max(error, moved)
        relative = max(relative, moved / _largest(alone[document]))
    for place in sorted({0, len(batch.where) - 1}):
        new = _others(tokens, batch.where[place][0], seed)
        for other, (now, old) in enumerate(zip(batch.run(place, new), base, strict=True)):
            if other != place:
                leak = max(leak, float(difference(now, old).max()))
    scale = max(_largest(a) for a in alone)
    if leak and leak <= _ROUNDING * scale and _has_experts(model):
        verdict = "rounding" if relative <= limit else "differs"
    elif leak:
        verdict = "leaks"
    else:
        verdict = "ok" if relative <= limit else "differs"
    positions = "not seen"
    for found in reversed(seen):
        if found.dim() == 2 and found.shape[1] == batch.shape[1]:
            here = found.expand(batch.shape).contiguous()
            positions = "restart" if check_positions(here, batch.packing, start=batch.first).passed else "run on"
            break
    note = "" if verdict in ("ok", "rounding") else way.remedy
    return WayReport(implementation, way.name, verdict, leak, error, relative, positions, note)


def _keys(
    model: Any, implementation: str, ways: Sequence[Way], rows: list[WayReport], tokens: list[Tensor], seed: int
) -> list[KeyInfluence]:
    """Which key moves which query: of the first way that ran, and of the one that leaks most (or differs most)."""
    ran = [(way, row) for way, row in zip(ways, rows, strict=True) if row.verdict != "not run"]
    if not ran:
        return []
    worst = max(ran, key=lambda pair: (pair[1].leak, pair[1].relative_error))
    chosen = [ran[0][0]] if worst[1].passed or worst[0] is ran[0][0] else [ran[0][0], worst[0]]
    by_itself = Way("alone", lambda packing, shape: dict(NO_CACHE), "")
    others = [_others(tokens, document, seed) for document in range(len(tokens))]
    alone = [_moved(_Batch(model, by_itself, [d]), [other]) for d, other in zip(tokens, others, strict=True)]
    scale = max(float(a.max()) for a in alone)
    result = []
    for way in chosen:
        batch = _Batch(model, way, tokens)
        order = [document for document, _, _ in batch.where]
        own = torch.block_diag(*(alone[document] for document in order))
        same = torch.block_diag(*(torch.ones_like(alone[document]) for document in order)) != 0
        found = _moved(batch, [others[document] for document in order])
        rounding = (found > 0) & (found <= _ROUNDING * scale)  # of a router's grouping, it reaches other documents too
        expected = (own != 0) | (rounding if _has_experts(model) else rounding & same)
        spans = spans_of(tokens[document].numel() for document in order)
        result.append(KeyInfluence(implementation, way.name, spans, expected, own > _FELT * scale, found))
    return result


def _moved(batch: _Batch, others: list[Tensor]) -> Tensor:
    """float64 [T, T] over the tokens of the batch: the largest change of a query's logits when a key's token is another."""
    base = torch.cat(batch.run())
    columns = []
    for place, other in enumerate(others):
        document = batch.where[place][0]
        for at in range(other.numel()):
            new = batch.tokens[document].clone()
            new[at] = other[at]
            columns.append(rows_moved(torch.cat(batch.run(place, new)), base)[0].double())
    return torch.stack(columns, 1)


def _largest(logits: Tensor) -> float:
    """The largest finite magnitude (models give -inf to tokens that cannot be); never 0."""
    return max(float(logits.abs().nan_to_num(nan=0.0, posinf=0.0).max()), 1e-30)


def _others(tokens: list[Tensor], document: int, seed: int) -> Tensor:
    """Other tokens for a document, drawn from those that occur, none at its own place."""
    vocabulary = torch.cat(tokens).unique()
    generator = torch.Generator().manual_seed(seed + document + 1)
    old = tokens[document]
    shift = torch.randint(1, max(vocabulary.numel(), 2), (old.numel(),), generator=generator).to(old.device)
    new: Tensor = vocabulary[(torch.searchsorted(vocabulary, old) + shift) % vocabulary.numel()]
    return new


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


@contextlib.contextmanager
def _watched(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Collects the positions that modules inside the model are called with."""
    seen: list[Tensor] = []

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = kwargs.get("position_ids")
        if isinstance(found, Tensor):
            seen.append(found)

    inner = [m for m in model.modules() if m is not model]
    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in inner]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
