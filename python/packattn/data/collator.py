"""Documents to one packed row, with every tensor that somebody's model looks for, all from the same boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import torch

from ..labels import mask_labels
from ..packing import Packing

Tail = Literal["own", "zeros", "drop"]


class PackedCollator:
    """Puts the examples of a batch into one row, [1, T].

    The batch holds ``input_ids``, ``labels``, ``position_ids`` (int64 [1, T]), ``seq_idx`` (int32 [1, T]),
    ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32 [N + 1]) and ``max_length_q`` and ``max_length_k`` (int): models
    take what they know. There is no attention_mask: one of ones would tell other implementations that the row is one
    document. The first label of every document is ``ignore_index``, because the model shifts labels. A batch of no tokens
    (a rank for which :class:`StreamPacker` has nothing left) is a row of one token of padding, or as many as it is padded to.
    It has no label to train: weigh its loss with :func:`packattn.loss_weights`, the mean over no token is NaN.

    Args:
        pad_token_id: token of the padding tail.
        pad_to_multiple_of: pad the row to a multiple of this many tokens.
        length: pad the row to this many tokens (for compiled models); more is an error.
        tail: what the padding is. "own": one more document, with positions from 0 and an offset of its own. "zeros":
            positions of 0, so that every padding token is a document (as TRL does). "drop": no document; the offsets
            end before it, ``seq_idx`` is -1 there.
        ignore_index: label of what is not trained.

    An example is a mapping with ``input_ids``, and optionally ``labels`` (default: the tokens), a mask of trained
    tokens (``completion_mask``, ``assistant_masks``: labels where it is 0 become ``ignore_index``), and ``seq_lengths``,
    if it holds several documents already (:func:`packattn.pack_dataset`, TRL); without them, ``position_ids`` that restart
    say so. An ``attention_mask`` may be there, but must be of ones: padded examples are refused. A sequence of examples is
    taken as such (the bins of :class:`StreamPacker`).
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        pad_to_multiple_of: int | None = None,
        length: int | None = None,
        tail: Tail = "own",
        ignore_index: int = -100,
    ) -> None:
        if tail not in get_args(Tail):
            raise ValueError(f"PackedCollator: tail must be one of {', '.join(get_args(Tail))}, got {tail!r}")
        if not isinstance(pad_token_id, int):
            raise TypeError(
                f"PackedCollator: pad_token_id must be an integer (a tokenizer may have none), got {type(pad_token_id).__name__}"
            )
        for name, value in (("pad_to_multiple_of", pad_to_multiple_of), ("length", length)):
            if value is not None and not isinstance(value, int):
                raise TypeError(f"PackedCollator: {name} must be an integer, got {type(value).__name__}")
            if value is not None and value < 1:
                raise ValueError(f"PackedCollator: {name} must be at least 1, got {value}")
        self.pad_token_id, self.pad_to_multiple_of, self.length = pad_token_id, pad_to_multiple_of, length
        self.tail, self.ignore_index = tail, ignore_index

    def __call__(self, examples: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        if isinstance(examples, (Mapping, str)):
            raise TypeError(f"PackedCollator: wanted a list of examples, got one {type(examples).__name__}")
        flat = [e for one in examples for e in ([one] if isinstance(one, Mapping) else _bin(one))]
        tokens: list[int] = []
        labels: list[int] = []
        lengths: list[int] = []
        for number, example in enumerate(flat):
            ids = _ints(example, "input_ids", number)
            given = _ints(example, "labels", number) if example.get("labels") is not None else list(ids)
            for mask in ("completion_mask", "assistant_masks"):
                if example.get(mask) is not None:
                    kept = _ints(example, mask, number)
                    _same(number, mask, kept, ids)
                    given = [x if keep else self.ignore_index for x, keep in zip(given, kept, strict=True)]
            _same(number, "labels", given, ids)
            parts = _parts(example, number, ids)
            if sum(parts) != len(ids) or min(parts, default=0) < 0:
                raise ValueError(
                    f"PackedCollator: seq_lengths of example {number} must add up to its {len(ids)} tokens, got {sum(parts)}"
                )
            tokens += ids
            labels += given
            lengths += [n for n in parts if n]
        return self._batch(tokens, labels, lengths)

    def _batch(self, tokens: list[int], labels: list[int], lengths: list[int]) -> dict[str, Any]:
        used = len(tokens)
        total = max(used, 1)  # models do not take rows of no tokens
        if self.length is not None:
            if used > self.length:
                raise ValueError(
                    f"PackedCollator: the batch must have at most length = {self.length} tokens, got {used}"
                )
            total = self.length
        if self.pad_to_multiple_of is not None:
            total += -total % self.pad_to_multiple_of
        padding = total - used
        input_ids = torch.tensor(tokens + [self.pad_token_id] * padding, dtype=torch.int64)
        target = torch.tensor(labels + [self.ignore_index] * padding, dtype=torch.int64)
        covered = list(lengths)
        if padding and self.tail != "drop":
            covered += [padding] if self.tail == "own" else [1] * padding
        packing = Packing.from_lengths(covered, total=total)
        cu = packing.cu_seqlens
        longest = max(covered, default=0)
        return {
            "input_ids": input_ids[None],
            "labels": mask_labels(target, packing, ignore_index=self.ignore_index)[None],
            "position_ids": packing.position_ids[None],
            "seq_idx": packing.segment_ids[None],
            "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _bin(one: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(one, Sequence) or not all(isinstance(example, Mapping) for example in one):
        raise TypeError(f"PackedCollator: examples must be mappings, or lists of them, got {type(one).__name__}")
    return one


def _parts(example: Mapping[str, Any], number: int, ids: list[int]) -> list[int]:
    """The lengths of the documents of an example."""
    known = example.get("seq_lengths") is not None
    if example.get("attention_mask") is not None:
        mask = _ints(example, "attention_mask", number)
        _same(number, "attention_mask", mask, ids)
        if not all(mask) or (not known and any(n != 1 for n in mask)):
            raise ValueError(
                f"PackedCollator: attention_mask of example {number} must be of ones; pass examples without padding, and "
                "seq_lengths for one that holds several documents"
            )
    if known:
        return _ints(example, "seq_lengths", number)
    if example.get("position_ids") is not None and ids:
        positions = _ints(example, "position_ids", number)
        _same(number, "position_ids", positions, ids)
        return Packing.from_position_ids(torch.tensor(positions)).lengths.tolist()
    return [len(ids)]


def _ints(example: Mapping[str, Any], name: str, number: int) -> list[int]:
    if name not in example:
        raise ValueError(f"PackedCollator: example {number} must have {name}, got {sorted(example)}")
    values = example[name]
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if any(not isinstance(x, Integral) for x in values):
        raise TypeError(f"PackedCollator: {name} of example {number} must be a flat list of integers")
    return [int(x) for x in values]


def _same(number: int, name: str, values: list[int], ids: list[int]) -> None:
    if len(values) != len(ids):
        raise ValueError(
            f"PackedCollator: {name} of example {number} must be as long as input_ids ({len(ids)}), got {len(values)}"
        )
