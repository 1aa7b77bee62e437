"""Packing: which documents share a row, so that rows of `capacity` tokens are as full as possible, or as equally costly.

`pack` returns `Bins`, arrays over the documents' fragments; a document is one fragment unless it was split. The native
module does the work; `_pack_slowly` does the same where it is not built.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ._library import extension

Algorithm = Literal["bfd", "bfd_split", "ffd", "next_fit", "balanced"]
Overflow = Literal["error", "truncate", "split"]
Int64 = NDArray[np.int64]
Core = Callable[[Int64, int, str, int], tuple[Int64, Int64]]
Rule = Callable[[list[int], int], Iterable[int]]

MAX_CAPACITY = 2**31
MAX_BINS = 2**26  # as many as are made before anything lies in them: more could take all memory


@dataclass(frozen=True, eq=False)
class Bins:
    """Documents distributed over bins of ``capacity`` tokens. F fragments, all arrays int64 and read-only.

    Bin b holds the fragments ``offsets[b]`` to ``offsets[b + 1] - 1``, in the order they lie in it. Fragment f is the
    tokens ``starts[f]`` to ``starts[f] + lengths[f] - 1`` of document ``items[f]``. Iterating gives, for each bin, its
    list of (item, start, length).
    """

    items: Int64
    """[F] index of the fragment's document in the lengths that were packed."""
    starts: Int64
    """[F] the fragment's first token within its document; 0 unless the document was split."""
    lengths: Int64
    """[F] tokens of the fragment."""
    offsets: Int64
    """[num_bins + 1]"""
    capacity: int
    truncated_tokens: int
    """Tokens that overflow="truncate" left out; no other way loses any."""

    @property
    def num_bins(self) -> int:
        """Bins, empty ones included."""
        return len(self.offsets) - 1

    @property
    def bin_of(self) -> Int64:
        """[F] bin of each fragment."""
        return np.repeat(np.arange(self.num_bins), np.diff(self.offsets))

    @property
    def tokens(self) -> Int64:
        """[num_bins] tokens in each bin."""
        return _sum_by_bin(self.lengths, self.offsets)

    @property
    def costs(self) -> Int64:
        """[num_bins] attention cost of each bin: the sum of its fragments' squared lengths."""
        return _sum_by_bin(self.lengths**2, self.offsets)

    @property
    def fill(self) -> float:
        """Packed tokens over the room in all bins; 1.0 if there is no bin."""
        return float(self.lengths.sum() / (self.num_bins * self.capacity)) if self.num_bins else 1.0

    def __len__(self) -> int:
        return self.num_bins

    def __getitem__(self, index: int) -> list[tuple[int, int, int]]:
        """(item, start, length) of each fragment in one bin."""
        number = range(self.num_bins)[index]
        part = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return list(
            zip(self.items[part].tolist(), self.starts[part].tolist(), self.lengths[part].tolist(), strict=True)
        )

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        return (self[number] for number in range(self.num_bins))

    def __repr__(self) -> str:
        return (
            f"Bins(num_bins={self.num_bins}, fragments={len(self.items)}, capacity={self.capacity}, fill={self.fill:.4f}, "
            f"truncated_tokens={self.truncated_tokens})"
        )


def pack(
    lengths: Sequence[int] | NDArray[Any] | torch.Tensor,
    capacity: int,
    algorithm: Algorithm = "bfd",
    *,
    overflow: Overflow | None = None,
    seed: int | None = None,
    num_bins: int | None = None,
) -> Bins:
    """Distribute documents of `lengths` tokens over bins (rows) of `capacity` tokens.

    Args:
        lengths: [N] integers, 0 or more. Documents of no tokens take no room; each still appears once: in its place with
            "next_fit", at the end of the last bin otherwise.
        capacity: tokens that a bin holds, 1 to 2**31.
        algorithm: how documents are placed.

            - "bfd", best fit decreasing: longest document first, each into the bin in which the least room would remain;
              of bins with equal room, the one that has had it longest (D. S. Johnson, "Near-optimal bin packing
              algorithms", 1973). The fullest bins, or equal to them.
            - "bfd_split": "bfd" with overflow="split".
            - "ffd", first fit decreasing: longest document first, each into the oldest bin with room (Johnson).
            - "next_fit" keeps the order of the documents: into the last bin, or a new one if it has no room.
            - "balanced", bins of equal attention cost, the sum of squared lengths: longest document first, each into the
              bin of least cost that has room (the rule "longest processing time first" of R. L. Graham, "Bounds on
              multiprocessing timing anomalies", 1969, with a limit on a bin's tokens).
        overflow: what to do with documents longer than `capacity`. "error" (the default) refuses them; "truncate" keeps
            their first `capacity` tokens, and `truncated_tokens` of the result counts the rest; "split" cuts them into
            fragments of `capacity` tokens and a shorter last one, each of which is then packed as a document.
        seed: shuffle the documents before packing, and the bins afterwards (the decreasing algorithms would give the
            bins with the longest documents first). 0 to 2**32 - 1; the same on every machine. None: no shuffle.
        num_bins: for "balanced" only: how many bins to fill, 1 to 2**26, some of which may remain empty. None: about as
            few as the rule can do with.

    Raises:
        TypeError, ValueError: naming the argument, what was wanted and what came.
    """
    sizes = _check_lengths(lengths)
    capacity = _check_int("capacity", capacity, 1, MAX_CAPACITY)
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm: expected one of {', '.join(get_args(Algorithm))}, got {algorithm!r}")
    if overflow is not None and overflow not in get_args(Overflow):
        raise ValueError(f"overflow: expected one of {', '.join(get_args(Overflow))}, got {overflow!r}")
    if algorithm == "bfd_split":
        if overflow not in (None, "split"):
            raise ValueError(f'overflow: algorithm "bfd_split" splits, so expected None or "split", got {overflow!r}')
        algorithm, overflow = "bfd", "split"
    if num_bins is not None:
        if algorithm != "balanced":
            raise ValueError(
                f'num_bins: expected None unless algorithm is "balanced", got {num_bins} for {algorithm!r}'
            )
        num_bins = _check_int("num_bins", num_bins, 1, MAX_BINS)

    # The legacy generator, because numpy promises that its numbers never change.
    random = None if seed is None else np.random.RandomState(_check_int("seed", seed, 0, 2**32 - 1))
    items = np.arange(len(sizes), dtype=np.int64)
    if random is not None:
        random.shuffle(items)
        sizes = sizes[items]
    items, starts, sizes, truncated = _fragments(items, sizes, capacity, overflow or "error")
    order, offsets = _bin_order(sizes, capacity, algorithm, num_bins)
    if random is not None:
        order, offsets = _shuffle_bins(order, offsets, random)
    bins = Bins(items[order], starts[order], sizes[order], offsets, capacity, truncated)
    for array in (bins.items, bins.starts, bins.lengths, bins.offsets):
        array.flags.writeable = False
    return bins


def _check_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
    return int(value)


def _check_lengths(lengths: Sequence[int] | NDArray[Any] | torch.Tensor) -> Int64:
    if isinstance(lengths, torch.Tensor):
        if lengths.is_floating_point() or lengths.is_complex():
            raise TypeError(f"lengths: expected integers, got {lengths.dtype}")
        lengths = lengths.detach().cpu().numpy()
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError("lengths: expected one dimension, got sequences of different lengths") from None
    if array.ndim != 1:
        raise ValueError(f"lengths: expected one dimension, got shape {list(array.shape)}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"lengths: expected integers, got {array.dtype}")
    if array.size and array.min() < 0:
        where = int(array.argmin())
        raise ValueError(f"lengths: expected 0 or more, got {array[where]} at index {where}")
    if array.size and array.sum(dtype=np.float64) >= 2**62:  # the sums below are int64
        raise ValueError(f"lengths: expected fewer than 2**62 tokens together, got {sum(array.tolist())}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _fragments(items: Int64, sizes: Int64, capacity: int, overflow: Overflow) -> tuple[Int64, Int64, Int64, int]:
    """(items, starts, lengths) of the fragments of the documents `items`, in their order, and the tokens left out."""
    starts = np.zeros(len(sizes), dtype=np.int64)
    long = sizes > capacity
    if not long.any():
        return items, starts, sizes, 0
    if overflow == "error":
        longest = int(sizes.argmax())
        raise ValueError(
            f"lengths: expected at most capacity ({capacity}) tokens in a document, got {int(long.sum())} longer ones, the "
            f'longest {sizes[longest]} at index {items[longest]}; overflow="split" or "truncate" packs them'
        )
    if overflow == "truncate":
        return items, starts, np.minimum(sizes, capacity), int((sizes[long] - capacity).sum())
    counts = np.maximum(-(-sizes // capacity), 1)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(first)) - first) * capacity
    return np.repeat(items, counts), starts, np.minimum(np.repeat(sizes, counts) - starts, capacity), 0


def _bin_order(sizes: Int64, capacity: int, algorithm: str, num_bins: int | None) -> tuple[Int64, Int64]:
    """(order [F], offsets [num_bins + 1]): the fragments bin by bin."""
    core: Core = _pack_slowly if extension is None else extension.pack
    if len(sizes) == 0:
        return sizes, np.zeros((num_bins or 0) + 1, dtype=np.int64)
    if algorithm != "balanced":
        return core(sizes, capacity, algorithm, 1)
    wanted = num_bins or max(1, -(-int(sizes.sum()) // capacity))
    order, offsets = core(sizes, capacity, algorithm, wanted)
    if num_bins is not None and len(offsets) - 1 > num_bins:
        raise ValueError(
            f"num_bins: expected enough bins of capacity ({capacity}) for {sizes.sum()} tokens: the rule of "
            f'"balanced" takes {len(offsets) - 1}, got {num_bins}'
        )
    if len(offsets) - 1 > wanted:
        # Bins that had to be opened on the way got the short documents only. Start again with that many; the one or two
        # that are opened then do not matter.
        order, offsets = core(sizes, capacity, algorithm, len(offsets) - 1)
    return order, offsets


def _shuffle_bins(order: Int64, offsets: Int64, random: np.random.RandomState) -> tuple[Int64, Int64]:
    counts = np.diff(offsets)
    chosen = random.permutation(len(counts))
    shuffled = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts[chosen])])
    places = np.repeat(offsets[:-1][chosen] - shuffled[:-1], counts[chosen]) + np.arange(len(order))
    return order[places], shuffled


def _sum_by_bin(values: Int64, offsets: Int64) -> Int64:
    return np.diff(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])[offsets])


# ---- without the native module ---------------------------------------------------------------------------------------


def _pack_slowly(lengths: Int64, capacity: int, algorithm: str, num_bins: int) -> tuple[Int64, Int64]:
    """What packattn._C.pack does (csrc/python/packer.cpp), with the same result: (order [F], offsets [bins + 1])."""
    sizes = lengths.tolist()
    if algorithm == "next_fit":
        order = np.arange(len(sizes))
        bin_of = _next_fit(sizes, capacity)
        bins = max(bin_of, default=-1) + 1
    else:
        order = np.argsort(-lengths, kind="stable")
        rules: dict[str, Rule] = {
            "bfd": _best_fit,
            "ffd": _first_fit,
            "balanced": partial(_least_cost, bins=num_bins),
        }
        bin_of, bins = [-1] * len(sizes), 0
        longest_first = [i for i in order.tolist() if sizes[i] > 0]
        for i, number in zip(longest_first, rules[algorithm]([sizes[i] for i in longest_first], capacity), strict=True):
            bin_of[i] = number
            bins = max(bins, number + 1)
        bins = max(bins, num_bins if algorithm == "balanced" else 0, 1 if sizes else 0)
        bin_of = [bins - 1 if number < 0 else number for number in bin_of]
    placed = np.asarray(bin_of, dtype=np.int64)
    order = order[np.argsort(placed[order], kind="stable")]
    return order, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.bincount(placed, minlength=bins))])


def _next_fit(sizes: list[int], capacity: int) -> list[int]:
    numbers, number, space = [], 0, capacity
    for size in sizes:
        if size > space:
            number, space = number + 1, capacity
        space -= size
        numbers.append(number)
    return numbers


def _best_fit(sizes: list[int], capacity: int) -> Iterator[int]:
    bins = 0
    spaces: list[int] = []  # ascending, those in use
    queues: defaultdict[int, deque[int]] = defaultdict(deque)
    for size in sizes:
        at = bisect.bisect_left(spaces, size)
        space = spaces[at] if at < len(spaces) else capacity
        if at < len(spaces):
            number = queues[space].popleft()
            if not queues[space]:
                del spaces[at]
        else:
            number, bins = bins, bins + 1
        if space > size:
            if not queues[space - size]:
                bisect.insort(spaces, space - size)
            queues[space - size].append(number)
        yield number


def _first_fit(sizes: list[int], capacity: int) -> Iterator[int]:
    leaves = 1 << len(sizes).bit_length()
    most_space = [capacity] * (2 * leaves)
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node + (most_space[2 * node] < size)
        yield node - leaves
        most_space[node] -= size
        while node := node // 2:
            most_space[node] = max(most_space[2 * node], most_space[2 * node + 1])


def _least_cost(sizes: list[int], capacity: int, bins: int) -> Iterator[int]:
    fitting = [(0, number, capacity) for number in range(bins)]  # cost, bin, space
    too_full: list[tuple[int, int, int]] = []  # -space, bin, cost
    for size in sizes:
        while too_full and -too_full[0][0] >= size:
            space, number, cost = heapq.heappop(too_full)
            heapq.heappush(fitting, (cost, number, -space))
        while fitting and fitting[0][2] < size:
            cost, number, space = heapq.heappop(fitting)
            heapq.heappush(too_full, (-space, number, cost))
        if not fitting:
            fitting.append((0, bins, capacity))
            bins += 1
        cost, number, space = heapq.heappop(fitting)
        heapq.heappush(fitting, (cost + size * size, number, space - size))
        yield number
