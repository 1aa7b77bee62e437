"""A Hugging Face Dataset, packed as TRL packs it, but over all of it at once and with a choice of algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..packer import Bins, pack

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

Strategy = Literal["bfd", "bfd_split", "ffd", "next_fit", "balanced"]


def pack_dataset(
    dataset: datasets.Dataset,
    seq_length: int,
    strategy: Strategy = "bfd",
    map_kwargs: dict[str, Any] | None = None,
    *,
    overflow: Literal["error", "truncate", "split"] | None = None,
    seed: int | None = None,
) -> datasets.Dataset:
    """Packs the rows of a dataset into rows of up to ``seq_length`` tokens.

    As ``trl.pack_dataset``: every column of lists is packed alike, and a column ``seq_lengths`` says how long the
    documents in each row are; give the result to SFTTrainer with ``packing=False, padding_free=True``, or to
    :class:`packattn.data.PackedCollator`. Unlike it, the whole dataset is packed at once and not 1000 rows at a time, and
    documents are never joined.

    Args:
        dataset: with columns of lists only, equally long in every row (``input_ids``, ``labels``, masks). Empty rows
            are left out.
        strategy: an algorithm of :func:`packattn.pack`. "bfd" cuts documents that are too long (as TRL does),
            "bfd_split" splits them, the others refuse them, unless ``overflow`` says otherwise.
        map_kwargs: for ``Dataset.map``, which writes the rows: ``num_proc``, ``batch_size``, ``desc``.
        seed: shuffle the documents and the rows.

    Raises:
        ValueError: an unknown strategy, columns that are not lists or not equally long, or documents longer than
            ``seq_length`` that may be neither cut nor split.
    """
    import datasets

    if strategy not in get_args(Strategy):
        raise ValueError(f"pack_dataset: strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(
            f"pack_dataset: dataset must be a datasets.Dataset, got {type(dataset).__name__}; pack the splits of a "
            "DatasetDict one by one, and streams with StreamPacker"
        )
    if not dataset.column_names:
        raise ValueError("pack_dataset: dataset must have columns of lists, got none")
    if "seq_lengths" in dataset.column_names:
        raise ValueError("pack_dataset: dataset has seq_lengths already: it is packed")
    arrow = dataset.with_format("arrow")
    lengths = _lengths(arrow)
    if overflow is None and strategy == "bfd":
        overflow = "truncate"
    full = np.flatnonzero(lengths)
    bins = pack(lengths[full], seq_length, strategy, overflow=overflow, seed=seed)
    numbers = datasets.Dataset.from_dict({"bin": list(range(bins.num_bins))})
    options = {"desc": f"Packing {len(full)} rows into {bins.num_bins}", **(map_kwargs or {})}
    packed = numbers.map(
        _gather,
        batched=True,
        remove_columns=["bin"],
        fn_kwargs={"source": arrow, "bins": bins, "rows": full},
        **options,
    )
    return packed.with_format(dataset.format["type"])


def _lengths(arrow: datasets.Dataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    found: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for start in range(0, len(arrow), 10_000):
        table = arrow[start : start + 10_000]
        first: np.ndarray[Any, np.dtype[np.int64]] | None = None
        for name, column in zip(table.column_names, table.columns, strict=True):
            kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
            if not any(kind(column.type) for kind in kinds):
                raise ValueError(
                    f"pack_dataset: column {name!r} must hold lists, got {column.type}; remove it with "
                    f"dataset.remove_columns([{name!r}])"
                )
            here = np.asarray(pc.fill_null(pc.list_value_length(column), 0).to_numpy(), dtype=np.int64)
            if first is None:
                first = here
            elif not np.array_equal(first, here):
                row = int(np.flatnonzero(first != here)[0])
                raise ValueError(
                    f"pack_dataset: columns must be equally long in every row; in row {start + row} "
                    f"{table.column_names[0]!r} has {first[row]} and {name!r} {here[row]}"
                )
        if first is not None:
            found.append(first)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _gather(batch: dict[str, list[int]], source: datasets.Dataset, bins: Bins, rows: Any) -> pa.Table:
    import pyarrow as pa

    parts = [slice(int(bins.offsets[b]), int(bins.offsets[b + 1])) for b in batch["bin"]]
    order = np.concatenate([np.arange(p.start, p.stop) for p in parts])
    starts, lengths = bins.starts[order], bins.lengths[order]
    table = source[rows[bins.items[order]].tolist()].combine_chunks()
    ends = np.cumsum(lengths)
    row_ends = np.cumsum([int(bins.lengths[p].sum()) for p in parts])
    columns = []
    for column in table.columns:
        if pa.types.is_fixed_size_list(column.type):  # rows of a packed dataset are of any length
            column = column.cast(pa.list_(column.type.value_type))
        whole = column.combine_chunks()
        whole = whole.chunks[0] if isinstance(whole, pa.ChunkedArray) else whole
        offsets = whole.offsets.to_numpy().astype(np.int64)[:-1] - int(whole.offsets[0].as_py())
        # token t of fragment f is value offsets[f] + starts[f] + t of the flattened column
        index = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths) + np.repeat(offsets + starts, lengths)
        columns.append(
            type(whole).from_arrays(
                np.concatenate([[0], row_ends]).astype(whole.offsets.type.to_pandas_dtype()),
                whole.flatten().take(index),
            )
        )
    counts = np.concatenate([[0], np.cumsum([p.stop - p.start for p in parts])]).astype(np.int32)
    columns.append(pa.ListArray.from_arrays(counts, pa.array(lengths.astype(np.int32))))
    return pa.Table.from_arrays(columns, names=[*table.column_names, "seq_lengths"])
