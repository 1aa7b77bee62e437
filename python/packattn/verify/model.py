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
from ..packing import Packing
from .positions import check_positions
from .report import Report, difference, magnitude, plain, table

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "packattn")
# Largest error of packed against alone, relative to the largest logit of the document (other matrix shapes round
# differently in every layer).
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# What the grouping of tokens by a router may move in a mixture of experts, relative to the largest logit.
_ROUNDING = 1e-5

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of calling a model with packed rows.

    Attributes:
        name: of the way, as in the report.
        arguments: ``arguments(packing, shape)`` gives the keyword arguments, for a packing over [B, S] = shape.
        remedy: what to write instead where this way fails.
        rows: packed rows in the batch.
        tail: tokens of padding at the end of each row.
    """

    name: str
    arguments: Callable[[Packing, tuple[int, int]], Arguments]
    remedy: str
    rows: int = 1
    tail: int = 0


def _positions(packing: Packing, shape: tuple[int, int]) -> Tensor:
    return packing.position_ids.view(shape)


def _ids(packing: Packing, shape: tuple[int, int]) -> Tensor:
    return packing.segment_ids.view(shape).long() + 1


def _cu(packing: Packing) -> Arguments:
    longest = int(packing.lengths.max())
    cu = packing.cu_seqlens
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


_NO_CACHE: Arguments = {"use_cache": False}
_PACKATTN = (
    "no way of calling keeps this model's documents apart here; "
    'packattn.integrations.transformers.register(); model.set_attn_implementation("packattn"); '
    "packattn.integrations.transformers.prepare(model)"
)
_OTHER_LAYERS = (
    "layers other than attention mix the documents (linear attention and convolutions need seq_idx and cu_seq_lens, and "
    "often a package that takes them); if there are none, please report this"
)
_SAY = "model(input_ids, position_ids=position_ids, use_cache=False) and no attention_mask"

WAYS = (
    Way(
        "position_ids, no cache",
        lambda p, s: {"position_ids": _positions(p, s), **_NO_CACHE},
        _PACKATTN,
    ),
    Way(
        "position_ids, default cache",
        lambda p, s: {"position_ids": _positions(p, s)},
        f"the cache switches the detection of packed rows off; {_SAY}",
    ),
    Way(
        "position_ids, all-ones mask",
        lambda p, s: {
            "position_ids": _positions(p, s),
            "attention_mask": torch.ones(s, dtype=torch.int64, device=p.device),
            **_NO_CACHE,
        },
        f"the mask says that a row is one document; {_SAY}",
    ),
    Way(
        "position_ids, mask of ids",
        lambda p, s: {"position_ids": _positions(p, s), "attention_mask": _ids(p, s), **_NO_CACHE},
        f"transformers makes ones of the ids; {_SAY}",
    ),
    Way(
        "mask of ids alone",
        lambda p, s: {"attention_mask": _ids(p, s), **_NO_CACHE},
        f"transformers makes ones of the ids and positions run on; {_SAY}",
    ),
    Way(
        "cu_seq_lens alone",
        lambda p, s: {**_cu(p), **_NO_CACHE},
        f"cu_seq_lens are for flash attention and ignored here; {_SAY}",
    ),
    Way(
        "seq_idx alone",
        lambda p, s: {"seq_idx": p.segment_ids.view(s), **_NO_CACHE},
        f"seq_idx is for linear attention and ignored here; {_SAY}",
    ),
    Way(
        "position_ids and cu_seq_lens",
        lambda p, s: {"position_ids": _positions(p, s), **_cu(p), **_NO_CACHE},
        _PACKATTN,
    ),
    Way(
        "two packed rows",
        lambda p, s: {"position_ids": _positions(p, s), **_NO_CACHE},
        "one packed row per batch",
        rows=2,
    ),
    Way(
        "padded tail",
        lambda p, s: {"position_ids": torch.where(p.is_padding, 0, p.position_ids).view(s), **_NO_CACHE},
        "leave the padding off the end of the row",
        tail=3,
    ),
)


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


@dataclasses.dataclass(frozen=True)
class ModelReport(Report):
    """What check_model found. rows: implementation by implementation, in the order asked for. It passes if every row
    that ran passed and at least one ran."""

    model: str
    lengths: tuple[int, ...]
    tolerance: float
    rows: tuple[WayReport, ...]

    @property
    def passed(self) -> bool:
        ran = [row for row in self.rows if row.verdict != "not run"]
        return bool(ran) and all(row.passed for row in ran)

    def failures(self) -> list[str]:
        """What is wrong, and the line that mends it; ways that are mended alike are put together."""
        lines = []
        for name in dict.fromkeys(row.implementation for row in self.rows):
            failed = [row for row in self.of(name) if not row.passed and row.verdict != "not run"]
            for note in dict.fromkeys(row.note for row in failed):
                alike = [row for row in failed if row.note == note]
                worst = max(alike, key=lambda row: (row.leak, row.error))
                lines.append(f"{name}: {'; '.join(row.way for row in alike)}: {_fault(worst)}. Instead: {note}")
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
        missing = {row.implementation: row.note for row in self.rows if row.verdict == "not run"}
        lines += [f"  - {name} was not run everywhere: {note}" for name, note in missing.items()]
        return "\n".join(lines).rstrip()


def _fault(row: WayReport) -> str:
    if row.verdict == "leaks":
        return f"documents see each other, {magnitude(row.leak)} is what logits move by"
    return f"logits differ from the documents alone by {magnitude(row.error)}"


def check_model(
    model: Any,
    documents: Sequence[Tensor] | None = None,
    *,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    ways: Sequence[Way] = WAYS,
    tolerance: float | None = None,
    seed: int = 0,
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
    hf.register()
    before = model.config._attn_implementation
    total, done = len(implementations) * len(ways), 0
    rows: list[WayReport] = []
    limit = tolerance if tolerance is not None else _TOLERANCE.get(model.dtype, 1e-1)
    with _eval(model):
        try:
            for name in implementations:
                remove: Callable[[], None] | None = None
                try:
                    model.set_attn_implementation(name)
                    if model.config._attn_implementation == before != name:  # transformers only logs it
                        raise ValueError(f"{type(model).__name__} cannot change its attention implementation")
                    if name == "packattn":
                        remove = hf.prepare(model)
                    alone = [_logits(model(d[None], **_accepted(model, _NO_CACHE)))[0] for d in tokens]
                    if any(bool(a.isnan().any()) for a in alone):
                        raise ValueError("the logits of the documents alone are NaN: nothing can be learnt from them")
                except Exception as error:  # noqa: BLE001  (whatever a model raises is its answer)
                    rows += [_not_run(name, way.name, error) for way in ways]
                    done += len(ways)
                    continue
                else:
                    for way in ways:
                        try:
                            rows.append(_try(model, name, way, tokens, alone, limit, seed))
                        except Exception as error:  # noqa: BLE001
                            rows.append(_not_run(name, way.name, error))
                        done += 1
                        if progress is not None:
                            progress(done, total)
                    rows[-len(ways) :] = _mend(rows[-len(ways) :])
                finally:
                    if remove is not None:
                        remove()
        finally:
            model.set_attn_implementation(before)
    return ModelReport(type(model).__name__, tuple(d.numel() for d in tokens), limit, tuple(rows))


def _mend(rows: list[WayReport]) -> list[WayReport]:
    """Advice that holds: where the plainest call fails too, no other call of this implementation helps."""
    if not rows or rows[0].passed or rows[0].verdict == "not run":
        return rows
    note = _PACKATTN if rows[0].implementation != "packattn" else _OTHER_LAYERS
    return [row if row.passed or row.verdict == "not run" else dataclasses.replace(row, note=note) for row in rows]


def _documents(model: Any, documents: Sequence[Tensor] | None, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if documents is None:
        vocabulary = model.config.get_text_config().vocab_size
        lengths = (7, 12, 1, 9)
        documents = [torch.randint(3, vocabulary, (n,), generator=generator) for n in lengths]
    tokens = [d for d in documents if d.numel()]
    for number, d in enumerate(tokens):
        if d.dim() != 1 or d.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"check_model: documents[{number}] must be int64 [length], got {d.dtype} {list(d.shape)}")
    if len(tokens) < 2:
        raise ValueError(f"check_model: documents must hold at least two with tokens, got {len(tokens)}")
    if torch.cat(tokens).unique().numel() < 2:  # one is replaced by others of these tokens, to see what it moves
        raise ValueError(
            f"check_model: documents must hold at least two different tokens, got only {int(tokens[0][0])}"
        )
    return [d.to(model.device).long() for d in tokens]


@contextlib.contextmanager
def _eval(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    said = set(_library._warned)
    try:
        model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            # The calls contradict themselves on purpose; what is said about that once must still come in real use.
            warnings.filterwarnings("ignore", "packattn: the batch is packed", RuntimeWarning)
            yield
    finally:
        _library._warned.intersection_update(said)
        for module, training in modes:
            module.training = training


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


def _try(
    model: Any, implementation: str, way: Way, tokens: list[Tensor], alone: list[Tensor], limit: float, seed: int
) -> WayReport:
    from ..integrations.transformers import first_position

    device = tokens[0].device
    lengths = [d.numel() for d in tokens]
    row = sum(lengths) + way.tail
    # The second row holds the documents the other way round, so that rows of a batch are packed differently.
    orders = [list(range(len(tokens))), list(reversed(range(len(tokens))))][: way.rows]
    shape = (len(orders), row)
    ids = torch.full(shape, -1, dtype=torch.int64, device=device)
    where: list[tuple[int, int, int]] = []  # (document, batch row, first token)
    for b, order in enumerate(orders):
        start = 0
        for document in order:
            ids[b, start : start + lengths[document]] = len(where)
            where.append((document, b, start))
            start += lengths[document]
    packing = Packing.from_segment_ids(ids, pad_id=-1)
    arguments = _accepted(model, way.arguments(packing, shape))
    first = first_position(model)
    if first and "position_ids" in arguments:
        arguments = {**arguments, "position_ids": arguments["position_ids"] + first}
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0

    def run(replaced: int | None) -> list[Tensor]:
        batch = torch.full(shape, pad, dtype=torch.int64, device=device)
        for place, (document, b, start) in enumerate(where):
            new = _others(tokens, document, seed) if place == replaced else tokens[document]
            batch[b, start : start + lengths[document]] = new
        out = _logits(model(batch, **arguments))
        return [out[b, start : start + lengths[document]] for document, b, start in where]

    with _watched(model) as seen:
        base = run(None)
    error = relative = leak = 0.0
    for got, (document, _, _) in zip(base, where, strict=True):
        moved = float(difference(got, alone[document]).max())
        error = max(error, moved)
        relative = max(relative, moved / _largest(alone[document]))
    for place in sorted({0, len(where) - 1}):
        for other, (new, old) in enumerate(zip(run(place), base, strict=True)):
            if other != place:
                leak = max(leak, float(difference(new, old).max()))
    scale = max(_largest(a) for a in alone)
    if leak and leak <= _ROUNDING * scale and _has_experts(model):
        verdict = "rounding" if relative <= limit else "differs"
    elif leak:
        verdict = "leaks"
    else:
        verdict = "ok" if relative <= limit else "differs"
    positions = "not seen"
    for found in reversed(seen):
        if found.dim() == 2 and found.shape[1] == row:
            same = check_positions(found.expand(shape).contiguous(), packing, start=first).passed
            positions = "restart" if same else "run on"
            break
    note = "" if verdict in ("ok", "rounding") else way.remedy
    return WayReport(implementation, way.name, verdict, leak, error, relative, positions, note)


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
