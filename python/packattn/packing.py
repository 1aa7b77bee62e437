"""Where the documents of a packed row lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import checks, ops  # noqa: F401  (the ops must be registered)
from .metadata import cu_seqlens_from_lengths, cu_seqlens_from_position_ids, cu_seqlens_from_segment_ids

_INT32 = torch.int32


@dataclass(frozen=True, eq=False, repr=False)
class Packing:
    """Where the documents of a packed row (or batch of rows, flattened) lie.

    Immutable, on one device, and a pytree of tensors, so that it can be an argument of a compiled or exported
    function. Make one with a ``from_*`` method; what they refuse, and how, is said in :mod:`packattn.metadata`. T is the
    number of tokens, N the number of documents. What attention needs has one entry per token, so a compiled model does
    not depend on N.

    Attributes:
        cu_seqlens: int32 [M + 1], offsets as varlen kernels take them. M == N unless there is padding between
            documents: a run of padding is an entry of its own (offsets cannot skip it). Unused capacity repeats the
            last offset.
        starts: int32 [N], first row of each document.
        ends: int32 [N], one past the last row of each document.
        begin: int32 [T], ``starts`` of the token's document; padding has begin == end.
        end: int32 [T], ``ends`` of the token's document.
        segment_ids: int32 [T], number of the token's document, -1 for padding.
    """

    cu_seqlens: Tensor
    starts: Tensor
    ends: Tensor
    begin: Tensor
    end: Tensor
    segment_ids: Tensor

    # ---- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def _from_documents(cls, cu_seqlens: Tensor, starts: Tensor, ends: Tensor, total: int) -> Packing:
        begin, end, _, segment_ids = torch.ops.packattn.document_ranges(starts, ends, starts, ends, total)
        return cls(cu_seqlens, starts, ends, begin, end, segment_ids)

    @classmethod
    def from_lengths(
        cls, lengths: Iterable[int] | Tensor, total: int | None = None, device: torch.device | str | None = None
    ) -> Packing:
        """From the documents' lengths in order (zeros allowed). Rows past their sum, up to ``total``, are padding.

        Raises:
            ValueError: a negative length, or a sum above ``total``.
            TypeError: lengths that are not integers.
        """
        cu = cu_seqlens_from_lengths(lengths)
        if device is not None:  # look at the values before they move, where it does not wait for a device
            checks.cu_seqlens("from_lengths", cu, total)
            total = int(cu[-1]) if total is None else total
            cu = cu.to(device)
        return cls.from_cu_seqlens(cu, total)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int | None = None) -> Packing:
        """From int32 or int64 offsets [N + 1]; they start at 0 and do not decrease. Rows past the last offset, up to
        ``total``, are padding; ``total=None`` takes the last offset (waits for the device).

        Raises:
            ValueError: offsets of the wrong shape or dtype, or (on the CPU) with wrong values.
        """
        checks.cu_seqlens("from_cu_seqlens", cu_seqlens, total)
        total = int(cu_seqlens[-1]) if total is None else total
        # A copy: what the caller writes into its own tensor later must not move documents.
        cu = cu_seqlens.to(_INT32, copy=True)
        return cls._from_documents(cu, cu[:-1], cu[1:], total)

    @classmethod
    def from_segment_ids(
        cls, segment_ids: Tensor, pad_id: int | None = None, max_segments: int | None = None
    ) -> Packing:
        """From one id per token, [T] or [B, S] (rows are flattened, and every row starts a document).

        A document starts where the value changes; an id may come back and is then a new document. Tokens with
        ``pad_id`` belong to no document: 0 for attention masks that count documents from 1, None (no padding) for
        ``seq_idx``, which counts from 0. ``max_segments`` fixes the size of the per-document tensors; without it they
        have the exact size (waits for the device), or T inside a compiled function. More documents than
        ``max_segments`` are an error where values are looked at (CPU, ``PACKATTN_VALIDATE=1``); elsewhere the
        documents past it count as padding.

        Raises:
            ValueError: ids of the wrong shape or dtype, or more documents than ``max_segments``.
        """
        room = _room(segment_ids, max_segments)
        starts, ends = torch.ops.packattn.documents_from_segment_ids(segment_ids, pad_id, room)
        if pad_id is None:
            cu = cu_seqlens_from_segment_ids(segment_ids, None, room)
        else:  # every document may have a run of padding before it
            cu = cu_seqlens_from_segment_ids(segment_ids, pad_id, None if room is None else 2 * room)
        return cls._from_documents(cu, starts, ends, segment_ids.numel())

    @classmethod
    def from_position_ids(
        cls, position_ids: Tensor, rule: str = "step", max_segments: int | None = None, plane: int | None = None
    ) -> Packing:
        """From positions that restart, [T] or [B, S]; every row starts a document.

        Args:
            rule: "step": a document starts where ``pos[t] != pos[t - 1] + 1``. "zero": where ``pos[t] == 0``, for
                positions that jump inside a document (PoSE).
            plane: which plane of 3-D mRoPE positions [P, B, S] counts tokens (0 where there are 4).
            max_segments: as in :meth:`from_segment_ids`.

        Raises:
            ValueError: positions of the wrong shape or dtype (three planes without ``plane``), or an unknown rule.
        """
        cu = cu_seqlens_from_position_ids(position_ids, rule, _room(position_ids, max_segments), plane=plane)
        total = position_ids.numel() if plane is None else position_ids[plane].numel()
        return cls._from_documents(cu, cu[:-1], cu[1:], total)

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor, max_segments: int | None = None) -> Packing:
        """From a padding mask [B, S] or [S]: 0 or False is padding, and documents are told apart by their value
        (ones for one document a row, or the ids 1, 2, ... of packed rows).

        Raises:
            TypeError: a mask that is not bool, int32 or int64.
            ValueError: a mask of more than two dimensions.
        """
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype not in (torch.bool, torch.int32, torch.int64):
            raise TypeError(
                "from_attention_mask: attention_mask must be bool, int32 or int64 (1 = token, 0 = padding), got "
                + checks.describe(attention_mask)
            )
        if attention_mask.dim() not in (1, 2):
            raise ValueError(
                "from_attention_mask: attention_mask must be a padding mask [S] or [B, S], got "
                + checks.describe(attention_mask)
            )
        mask = attention_mask.to(_INT32) if attention_mask.dtype == torch.bool else attention_mask
        return cls.from_segment_ids(mask, pad_id=0, max_segments=max_segments)

    # ---- reading it ----------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """T, the number of tokens, padding included."""
        return self.begin.shape[0]

    @property
    def num_documents(self) -> int:
        """N, empty documents and unused capacity included."""
        return self.starts.shape[0]

    @property
    def lengths(self) -> Tensor:
        """int32 [N], tokens of each document."""
        return self.ends - self.starts

    @property
    def position_ids(self) -> Tensor:
        """int64 [T], 0 at each document's first token; a run of padding counts from 0 on its own."""
        return torch.arange(self.total, device=self.device) - self.begin

    @property
    def is_padding(self) -> Tensor:
        """bool [T], tokens that belong to no document."""
        return self.begin >= self.end

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.begin.device

    def key_ranges(
        self,
        packing_k: Packing | None = None,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        chunk_size: int = 0,
        prefix_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The mask as two int32 [T] tensors: row i sees key j iff ``key_begin[i] <= j < key_end[i]``.

        Args:
            packing_k: where the keys' documents lie, if not as the queries'; document n of one attends to document n
                of the other, aligned at their last tokens.
            causal: a token sees itself and what is before it; otherwise its whole document.
            window_size: (left, right) neighbours that are visible, -1 for no limit; right does not matter if causal.
            chunk_size: tokens see only keys of their own chunk of this many tokens, counted from the document's
                start; 0 for no chunks.
            prefix_lengths: integer [N], how many first tokens of each document every token of it sees (prefix-LM).

        Raises:
            ValueError: a window that is no pair of integers, prefix_lengths of another shape, device or dtype or (where
                values are looked at) negative, or a packing_k with another number of documents.
            TypeError: causal is no bool, packing_k no Packing.
        """
        left, right = _window(window_size)
        if not isinstance(causal, bool):  # None would pass for False, and show the future
            raise TypeError(f"key_ranges: causal must be True or False, got {checks.describe(causal)}")
        begin, end, diagonal = self.begin, self.end, None
        if packing_k is not None and packing_k is not self:
            expect(packing_k, "packing_k")
            begin, end, diagonal, _ = torch.ops.packattn.document_ranges(
                self.starts, self.ends, packing_k.starts, packing_k.ends, self.total
            )
        prefix_end = None
        if prefix_lengths is not None:
            if not isinstance(prefix_lengths, Tensor) or prefix_lengths.shape != self.starts.shape:
                raise ValueError(
                    f"key_ranges: prefix_lengths must be [num_documents] = [{self.num_documents}], got "
                    + checks.describe(prefix_lengths)
                )
            checks.integers("key_ranges", "prefix_lengths", prefix_lengths)
            if prefix_lengths.device != self.device:
                raise ValueError(
                    f"key_ranges: prefix_lengths must be on {self.device} like the packing, got "
                    + checks.describe(prefix_lengths)
                )
            if checks.readable(prefix_lengths) and bool((prefix_lengths < 0).any()):
                n = int((prefix_lengths < 0).nonzero()[0])
                raise ValueError(
                    f"key_ranges: prefix_lengths must not be negative, got prefix_lengths[{n}] = {int(prefix_lengths[n])}"
                )
            # one more slot, for the tokens of no document
            padded = torch.nn.functional.pad(prefix_lengths.long(), (0, 1))
            prefix_end = (begin + padded[self.segment_ids.long()].clamp(0, checks.INT32_MAX)).clamp(
                max=checks.INT32_MAX
            )
            prefix_end = torch.where(self.is_padding, begin, prefix_end).to(_INT32)
        key_begin, key_end = torch.ops.packattn.key_ranges(
            begin, end, diagonal, prefix_end, causal, left, right, chunk_size
        )
        return key_begin, key_end

    def documents(self) -> list[slice]:
        """The rows of each document, on the host (waits for the device)."""
        return [slice(a, b) for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def validate(self) -> Packing:
        """Checks every value on any device (waits for it) and returns self.

        Raises:
            ValueError: naming the first entry that is wrong.
        """
        here = self.to("cpu")
        checks.cu_seqlens("validate", here.cu_seqlens, self.total)
        checks.documents("validate", here.starts, here.ends, here.starts, here.ends, self.total)
        begin, end, _, segment_ids = torch.ops.packattn.document_ranges(
            here.starts, here.ends, here.starts, here.ends, self.total
        )
        for name, want in (("begin", begin), ("end", end), ("segment_ids", segment_ids)):
            got = getattr(here, name)
            if got.shape != want.shape:
                raise ValueError(f"validate: {name} must be [total] = [{self.total}], got {checks.describe(got)}")
            if not torch.equal(got, want):
                t = int((got != want).nonzero()[0])
                raise ValueError(
                    f"validate: {name} must follow from starts and ends, want {int(want[t])} at token {t}, got {int(got[t])}"
                )
        # cu_seqlens says the same a second time: the same tokens must begin a document or a run of padding.
        apart = torch.ops.packattn.position_ids_from_cu_seqlens(here.cu_seqlens, self.total) != here.position_ids
        if bool(apart.any()):
            t = int(apart.nonzero()[0])
            raise ValueError(
                f"validate: cu_seqlens must follow from starts and ends, got entries that begin elsewhere near token {t}"
            )
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        """The same packing on another device."""
        if not isinstance(device, (torch.device, str, int)):  # Tensor.to would take a dtype, and make floats of offsets
            raise TypeError(f"to: device must be a device or its name, got {checks.describe(device)}")
        return Packing(*(getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)))

    def __repr__(self) -> str:
        if not checks.has_values(self.begin):
            return "Packing(<traced>)"
        lengths, padding = self.lengths.tolist(), int(self.is_padding.sum())
        shown = ", ".join(map(str, lengths[:8])) + (f", ... (longest {max(lengths)})" if len(lengths) > 8 else "")
        words = [
            f"{len(lengths)} {'document' if len(lengths) == 1 else 'documents'}",
            f"{self.total} {'token' if self.total == 1 else 'tokens'}"
            + (f", {padding} of them padding" if padding else ""),
        ]
        tail = f"; lengths {shown}" if lengths else ""
        return f"Packing({', '.join(words)}{tail}{'' if self.device.type == 'cpu' else f'; on {self.device}'})"

    def _repr_html_(self) -> str | None:
        """For notebooks: a table and a bar with the documents."""
        from ._packing_html import packing_html

        return packing_html(self) if checks.has_values(self.begin) else None


def _room(ids: Tensor, max_segments: int | None) -> int | None:
    # Counting documents has no place in a graph; one document per token is the most there can be.
    if max_segments is None and torch.compiler.is_compiling():
        return ids.numel()
    return max_segments


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(isinstance(n, (bool, float, str, type(None))) for n in window_size):
        raise ValueError(f"window_size must be two integers (left, right), -1 for no limit, got {window_size!r}")
    return window_size[0], window_size[1]


def expect(value: object, name: str) -> Packing:
    """``value`` if it is a Packing; otherwise an error that says how to make one."""
    if not isinstance(value, Packing):
        raise TypeError(
            f"{name} must be a packattn.Packing (Packing.from_cu_seqlens, from_position_ids, ...), got "
            + checks.describe(value)
        )
    return value


def _flatten(packing: Packing) -> tuple[list[Tensor], None]:
    return [getattr(packing, f.name) for f in fields(packing)], None


pytree.register_pytree_node(
    Packing,
    _flatten,
    lambda leaves, _: Packing(*leaves),
    serialized_type_name="packattn.Packing",
    flatten_with_keys_fn=lambda p: ([(pytree.GetAttrKey(f.name), getattr(p, f.name)) for f in fields(p)], None),
)

# torch.export.load and torch.load(weights_only=True) take it: it holds tensors and nothing else.
torch.serialization.add_safe_globals([Packing])
