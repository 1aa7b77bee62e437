"""Packing a stream: windows of documents, packed, spread over ranks, and resumable between any two batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..packer import pack

_VERSION = 2
_SETTINGS = ("capacity", "window", "keep_order", "seed", "drop_last", "world_size")


class StreamPacker(IterableDataset[list[Any]]):
    """Yields bins, lists of documents of ``capacity`` tokens at most, for one rank.

    Every rank reads the same stream, ``window`` documents at a time, packs them in the same way and takes one bin of
    every step. Bins of one step have like attention cost (the sum of squared lengths), so that ranks wait little for each
    other. What does not fill a step, and one step more, goes on into the next window; at the end the rest is spread over
    the ranks. Every document is yielded by exactly one rank, exactly once, and every rank yields equally often.

    Every rank has documents in every step, but for the last one of an epoch, where there may be too few: five documents
    that fill a bin each, on four ranks, make one step of four and one in which three ranks yield an empty list. Such a
    rank has nothing to train but must take the step with the others; :class:`PackedCollator` makes a row of padding of
    it, with no label to train. ``drop_last`` leaves that step out on all ranks instead.

    Args:
        source: documents, in an order that is the same every time it is iterated (a list, a Dataset, a shuffled
            IterableDataset with its seed). With ``__getitem__`` and ``__len__``, resuming does not read what is past.
        capacity: tokens of a bin.
        window: documents that are packed together.
        keep_order: documents in the order of the stream: bin after bin, rank after rank ("next_fit"). Otherwise best fit
            decreasing.
        seed: shuffle: a source with ``__getitem__`` as a whole, differently in each epoch; any source within a window.
        drop_last: leave out the last step of an epoch if it has nothing for some rank (fewer documents than ranks go).
        rank, world_size: which bins are yielded; by default those of torch.distributed if it is initialised.
        length: tokens of a document; by default ``len(document["input_ids"])``, or ``len(document)``.

    With DataLoader workers, each yields every n-th bin (pass ``batch_size=None``, so that their order is kept). The state
    is then in the workers' copies and not in this object, whose ``state_dict`` stays where it was: use a loader that
    collects it (torchdata's ``StatefulDataLoader``), and ``set_epoch`` for each epoch. A loader that takes every n-th
    batch for a rank of its own (accelerate's ``prepare``) would drop the rest: pass ``rank=0, world_size=1`` there.
    A document longer than ``capacity`` is an error that names it.
    """

    def __init__(
        self,
        source: Iterable[Any],
        capacity: int,
        *,
        window: int = 1024,
        keep_order: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        length: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(source, Mapping) or not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise TypeError(
                f"StreamPacker: source must be an iterable of documents (one split of a DatasetDict), got {type(source).__name__}"
            )
        capacity, window = _whole("capacity", capacity), _whole("window", window)
        if seed is not None and not 0 <= _whole("seed", seed) < 2**32:
            raise ValueError(f"StreamPacker: seed must be 0 to 2**32 - 1, got {seed}")
        if (rank is None) != (world_size is None):
            raise ValueError("StreamPacker: rank and world_size must be given together")
        if rank is None or world_size is None:
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ready else (0, 1)
        rank, world_size = _whole("rank", rank), _whole("world_size", world_size)
        if world_size < 1:
            raise ValueError(f"StreamPacker: world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"StreamPacker: rank must be 0 to {world_size - 1}, got {rank}")
        if window < 1 or capacity < 1:
            raise ValueError(f"StreamPacker: window and capacity must be at least 1, got {window} and {capacity}")
        if keep_order and seed is not None:
            raise ValueError("StreamPacker: keep_order and seed exclude each other")
        self.source, self.capacity, self.window, self.keep_order, self.seed = source, capacity, window, keep_order, seed
        self.drop_last, self.rank, self.world_size = drop_last, rank, world_size
        self.length = _length if length is None else length
        self._state = self._fresh(0)
        self._begun = 0  # iterations
        self._spent = False  # a source that can be read once has been

    def _fresh(self, epoch: int) -> dict[str, Any]:
        # next: the first document of the stream that no window has taken. carry: documents before it that are not yielded
        # yet (their places in the stream). step: how many steps of the window that begins there are done, and done: how
        # many steps there were in the windows before it.
        return {"version": _VERSION, "epoch": epoch, "next": 0, "carry": [], "step": 0, "done": 0}

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch anew (its number changes the shuffle)."""
        if _whole("epoch", epoch) < 0:
            raise ValueError(f"StreamPacker: epoch must not be negative, got {epoch}")
        self._state = self._fresh(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is, after the last bin that was yielded: plain numbers, the same on every rank."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {**self._state, "carry": list(self._state["carry"]), **settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken, with the same source.

        Raises:
            ValueError: a state of another version or of other settings, under which the bins would be others.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"StreamPacker: state must be what state_dict() returns, got {type(state).__name__}")
        if state.get("version") != _VERSION:
            raise ValueError(f"StreamPacker: state must be of version {_VERSION}, got {state.get('version')!r}")
        missing = [name for name in (*self._fresh(0), *_SETTINGS) if name not in state]
        if missing:
            raise ValueError(f"StreamPacker: state must be what state_dict() returns, it lacks {', '.join(missing)}")
        for name in _SETTINGS:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"StreamPacker: state was taken with {name} = {state[name]}, this one has {getattr(self, name)}"
                )
        carry = list(state["carry"])
        numbers = [state[name] for name in ("epoch", "next", "step", "done")] + carry
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or any(
            place >= state["next"] for place in carry
        ):
            raise ValueError(
                f"StreamPacker: state must be what state_dict() returns, its numbers do not fit: {dict(state)}"
            )
        self._state = {**{key: state[key] for key in self._fresh(0)}, "carry": carry}

    def __iter__(self) -> Iterator[list[Any]]:
        """From where the last iteration stopped (or the loaded state says) to the end of the epoch; the iteration after
        that is the next epoch. ``set_epoch`` begins anew."""
        self._begun += 1
        mine = self._begun
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        stream = self._stream()
        carried = {place: document for place, document in zip(self._state["carry"], stream, strict=False)}
        while True:
            fresh = dict(zip(range(self._state["next"], self._state["next"] + self.window), stream, strict=False))
            documents = {**carried, **fresh}
            last = len(fresh) < self.window
            steps, left = self._steps(documents, last)
            for step, bins in enumerate(steps):
                if step < self._state["step"]:
                    continue
                if mine != self._begun:
                    raise RuntimeError(
                        "StreamPacker: another iteration of this StreamPacker has begun; two of them would share its state, and "
                        "yield documents twice"
                    )
                self._state["step"] = step + 1
                if (self._state["done"] + step) % workers == number:
                    yield [documents[place] for place in bins[self.rank]]
            if last:
                break
            carried = {place: documents[place] for place in left}
            self._state.update(
                next=self._state["next"] + len(fresh), carry=left, step=0, done=self._state["done"] + len(steps)
            )
        self._state = self._fresh(self._state["epoch"] + 1)

    def _stream(self) -> Iterator[Any]:
        """The carried documents of the state, then those from ``next`` on."""
        start, carry = self._state["next"], self._state["carry"]
        if hasattr(self.source, "__getitem__") and hasattr(self.source, "__len__"):
            source: Any = self.source
            order = np.arange(len(source))
            if start > len(order):
                raise ValueError(
                    f"StreamPacker: the source has {len(order)} documents, but the state says that {start} were read"
                )
            if self.seed is not None:
                np.random.RandomState([self.seed, self._state["epoch"]]).shuffle(order)
            for place in (*carry, *range(start, len(order))):
                yield source[int(order[place])]
            return
        kept: dict[int, Any] = {}
        wanted = set(carry)
        iterator = iter(self.source)
        if iterator is self.source:
            if self._spent:
                raise ValueError(
                    f"StreamPacker: source is a {type(iterator).__name__}, which can be read once; pass something that can be "
                    "iterated again (a list, a Dataset, an IterableDataset)"
                )
            self._spent = True
        for place in range(start):
            try:
                document = next(iterator)
            except StopIteration:
                raise ValueError(
                    f"StreamPacker: the source ended after {place} documents, but the state says that {start} were read"
                ) from None
            if place in wanted:
                kept[place] = document
        yield from (kept[place] for place in carry)
        yield from iterator

    def _steps(self, documents: dict[int, Any], last: bool) -> tuple[list[list[list[int]]], list[int]]:
        """Steps of ``world_size`` bins each (the places of their documents), and the places that are left over."""
        places = list(documents)
        sizes = [self.length(documents[place]) for place in places]
        for place, size in zip(places, sizes, strict=True):
            if size > self.capacity:
                raise ValueError(
                    f"StreamPacker: documents must have at most capacity = {self.capacity} tokens, document {place} of the "
                    f"stream has {size}; cut or split it first"
                )
        if not places:
            return [], []
        seed = None if self.seed is None else int(np.random.RandomState([self.seed, places[-1]]).randint(2**31))
        algorithm: Literal["next_fit", "bfd"] = "next_fit" if self.keep_order else "bfd"
        packed = pack(sizes, self.capacity, algorithm, seed=seed)
        bins = [[places[item] for item, _, _ in one] for one in packed]
        costs = packed.costs.tolist()
        ranks = self.world_size
        # One step is always held back: the last bin may still take what comes, and where the stream ends there are
        # documents for every rank.
        whole = len(bins) // ranks * ranks if last else max(len(bins) // ranks - 1, 0) * ranks
        if self.keep_order:
            order = list(range(len(bins)))
        else:
            # The emptiest bins are left over, because the next window can fill them.
            tokens = packed.tokens.tolist()
            kept = sorted(range(len(bins)), key=lambda b: (-tokens[b], b))[:whole]
            kept.sort(key=lambda b: (-costs[b], b))
            order = [*kept, *sorted(set(range(len(bins))) - set(kept))]
        steps = [[bins[b] for b in order[i : i + ranks]] for i in range(0, whole, ranks)]
        rest = [bins[b] for b in order[whole:]]
        if last and rest:
            steps = self._end(steps, rest, dict(zip(places, sizes, strict=True)))
        if not self.keep_order and seed is not None:
            # The last step stays the last: it is the one in which ranks may have nothing.
            head = steps[:-1] if last else steps
            np.random.RandomState(seed).shuffle(head)
            steps = [*head, *steps[len(head) :]]
        return steps, [] if last else sorted(place for one in rest for place in one)

    def _end(self, steps: list[list[list[int]]], rest: list[list[int]], size: dict[int, int]) -> list[list[list[int]]]:
        """The last bins, fewer than ranks, as a step with something for every rank, if need be together with the step
        before (in which a document is taken from a rank that has several)."""
        ranks = self.world_size
        if not self.keep_order:
            try:
                items = [place for one in rest for place in one]
                spare = pack([size[place] for place in items], self.capacity, "balanced", num_bins=ranks)
                rest = [[items[item] for item, _, _ in one] for one in spare if len(one)]
            except ValueError:  # tight: equal costs do not fit into that many bins, but the bins as they are do
                pass
        last = self._divide(rest, ranks, size)
        if len(last) < ranks and steps:
            both = self._divide([*steps[-1], *last], 2 * ranks, size)
            if len(both) == 2 * ranks:
                if not self.keep_order:
                    both.sort(key=lambda one: -sum(size[place] ** 2 for place in one))
                return [*steps[:-1], both[:ranks], both[ranks:]]
        if len(last) < ranks and self.drop_last:
            return steps
        return [*steps, [*last, *([] for _ in range(ranks - len(last)))]]

    def _divide(self, bins: list[list[int]], wanted: int, size: dict[int, int]) -> list[list[int]]:
        """As many bins as wanted, as far as there are documents (that have tokens) for them; in the same order."""

        def filled(one: list[int]) -> list[int]:
            return [n for n, place in enumerate(one) if size[place]]

        given, bins = bins, []
        for one in given:  # documents of no tokens are no bin of their own
            if bins and not (filled(one) and filled(bins[-1])):
                bins[-1] = [*bins[-1], *one]
            else:
                bins.append(list(one))
        while len(bins) < wanted:
            most = max(range(len(bins)), key=lambda b: len(filled(bins[b])))
            one, inside = bins[most], filled(bins[most])
            if len(inside) < 2:
                break
            cut = inside[len(inside) // 2]
            bins[most : most + 1] = [one[:cut], one[cut:]]
        return bins


def _length(document: Any) -> int:
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise ValueError(f"StreamPacker: documents must have input_ids (or pass length=), got {sorted(document)}")
        return len(document["input_ids"])
    try:
        return len(document)
    except TypeError:
        raise TypeError(
            f"StreamPacker: documents must have a length (or pass length=), got {type(document).__name__}"
        ) from None


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"StreamPacker: {name} must be an integer, got {type(value).__name__}") from None
