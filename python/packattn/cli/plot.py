"""Draw the mask of a packed row, how full rows are, or which query sees which key, into a picture.

LENGTHS and IDS are numbers (5,4,3) or a file: .npy, .json, or text with numbers in it. Of "mask", give one of --lengths,
--cu-seqlens, --position-ids, --segment-ids and --attention-mask. The exit status is 0, 1 if "influence" found a fault, or 2
if something could not be read or drawn.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from packattn import Packing, attention, pack, plotting, verify
from packattn.cli import pictures, values
from packattn.packer import Algorithm, Overflow

SUMMARY = "pictures of masks, of how full rows are, and of what sees what"
EXAMPLES = """\
packattn plot mask --lengths 5,4,3                          three documents, causal
packattn plot mask --lengths 5,4,3 --window 2 --total 14    a sliding window, and 2 tokens of padding
packattn plot mask --position-ids batch.npy -o mask.svg     a batch of positions that restart
packattn plot mask --attention-mask ids.json --bidirectional
packattn plot bins lengths.txt --capacity 4096              fill and cost of the rows
packattn plot bins lengths.txt --capacity 4096 --algorithm bfd,next_fit
packattn plot influence --lengths 5,4,3                     packattn's attention, expected against found
packattn plot influence --lengths 5,4,3 --function causal   the causal mask of the whole row: it leaks
packattn plot influence --function mymodule:attention       a function of yours, called as packattn.attention
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="picture_kind", metavar="picture", required=True)

    mask = kinds.add_parser("mask", help="which key each query of a row sees, with documents and positions")
    source = mask.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="LENGTHS", help="tokens of each document")
    source.add_argument("--cu-seqlens", metavar="OFFSETS", help="offsets, 0 first")
    source.add_argument("--position-ids", metavar="IDS", help="positions that restart, [T] or [B, S]")
    source.add_argument("--segment-ids", metavar="IDS", help="a number for each document, [T] or [B, S]")
    source.add_argument("--attention-mask", metavar="IDS", help="0 for padding, documents numbered from 1")
    mask.add_argument(
        "--total", type=int, help="tokens of the row, for --lengths and --cu-seqlens; the rest is padding"
    )
    mask.add_argument("--pad-id", type=int, help="segment id of padding (default: none)")
    mask.add_argument(
        "--rule", choices=("step", "zero"), default="step", help="how positions begin a document (default: step)"
    )
    mask.add_argument("--bidirectional", action="store_true", help="a token sees its whole document (default: causal)")
    _add_pattern(mask)
    _add_output(mask, "packattn-mask.png")
    mask.set_defaults(draw=_mask)

    bins = kinds.add_parser("bins", help="how full rows are, and how even their cost")
    bins.add_argument("lengths", metavar="LENGTHS", help="tokens of each document")
    bins.add_argument("--capacity", type=int, required=True, help="tokens of a row")
    bins.add_argument(
        "--algorithm",
        default="bfd",
        metavar="NAMES",
        help=f"by commas, drawn side by side: {', '.join(get_args(Algorithm))} (default: bfd)",
    )
    bins.add_argument("--overflow", choices=get_args(Overflow), help="what to do with documents over the capacity")
    bins.add_argument("--num-bins", type=int, help="number of rows, for balanced")
    bins.add_argument("--seed", type=int, help="shuffle")
    _add_output(bins, "packattn-bins.png")
    bins.set_defaults(draw=_bins)

    influence = kinds.add_parser("influence", help="which query sees which key, expected against found")
    influence.add_argument(
        "--lengths", default="5,4,3", metavar="LENGTHS", help="tokens of each document (default: 5,4,3)"
    )
    influence.add_argument(
        "--function",
        default="packattn",
        help="packattn (default), causal (the causal mask of the whole row), or MODULE:NAME, called as (q, k, v, packing)",
    )
    influence.add_argument("--bidirectional", action="store_true", help="expect a token to see its whole document")
    _add_pattern(influence)
    _add_output(influence, "packattn-influence.png")
    influence.set_defaults(draw=_influence)


def _add_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window",
        type=_window,
        default=(-1, -1),
        metavar="LEFT[,RIGHT]",
        help="neighbours that are seen, -1: no limit",
    )
    parser.add_argument("--chunk", type=int, default=0, metavar="TOKENS", help="a token sees only its own chunk")


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=pictures.output_file,
        default=Path(default),
        metavar="FILE",
        help="png, svg or pdf (default %(default)s)",
    )
    parser.add_argument("--title", help="above the picture")


def run(args: argparse.Namespace) -> int:
    try:
        pictures.check(args.output)
        figure, words, status = args.draw(args)
        pictures.save(figure, args.output)
    except (ValueError, TypeError, IndexError, OSError, ImportError, AttributeError, RuntimeError) as error:
        print(f"packattn plot {args.picture_kind}: {error}", file=sys.stderr)
        return 2
    print(words)
    return int(status)


def _mask(args: argparse.Namespace) -> tuple[Any, str, int]:
    packing = _packing(args)
    figure = plotting.plot_mask(
        packing, causal=not args.bidirectional, window_size=args.window, chunk_size=args.chunk, title=args.title
    )
    return figure, repr(packing), 0


def _packing(args: argparse.Namespace) -> Packing:
    if args.total is not None and args.lengths is None and args.cu_seqlens is None:
        raise ValueError(
            "--total goes with --lengths and --cu-seqlens; positions and ids say how many tokens there are"
        )
    if args.pad_id is not None and args.segment_ids is None:
        raise ValueError("--pad-id goes with --segment-ids")
    if args.lengths is not None:
        lengths = values.integers("--lengths", args.lengths, dims=(1,))
        packing = Packing.from_lengths(lengths, total=args.total)
    elif args.cu_seqlens is not None:
        packing = Packing.from_cu_seqlens(values.integers("--cu-seqlens", args.cu_seqlens, dims=(1,)), args.total)
    elif args.position_ids is not None:
        packing = Packing.from_position_ids(values.integers("--position-ids", args.position_ids), rule=args.rule)
    elif args.segment_ids is not None:
        packing = Packing.from_segment_ids(values.integers("--segment-ids", args.segment_ids), pad_id=args.pad_id)
    else:
        packing = Packing.from_attention_mask(values.integers("--attention-mask", args.attention_mask))
    return packing


def _bins(args: argparse.Namespace) -> tuple[Any, str, int]:
    lengths = values.integers("LENGTHS", args.lengths, dims=(1,)).numpy()
    names = [name.strip() for name in args.algorithm.split(",") if name.strip()]
    unknown = [name for name in names if name not in get_args(Algorithm)]
    if unknown or not names:
        raise ValueError(f"--algorithm must be of {', '.join(get_args(Algorithm))}, got {args.algorithm!r}")
    found = {
        name: pack(
            lengths,
            args.capacity,
            name,
            overflow=args.overflow,
            seed=args.seed,
            num_bins=args.num_bins if name == "balanced" else None,
        )
        for name in names
    }
    figure = plotting.plot_bins(found, title=args.title)
    return figure, "\n".join(f"{name}: {bins!r}" for name, bins in found.items()), 0


def _influence(args: argparse.Namespace) -> tuple[Any, str, int]:
    lengths = values.integers("--lengths", args.lengths, dims=(1,)).tolist()
    if sum(lengths) > 200:
        raise ValueError(
            f"--lengths must be at most 200 tokens in all (each costs calls of the function), got {sum(lengths)}"
        )
    pattern: dict[str, Any] = {
        "causal": not args.bidirectional,
        "window_size": args.window,
        "chunk_size": args.chunk,
    }
    function: Callable[..., Any]
    if args.function == "packattn":
        function = functools.partial(attention, **pattern)
    elif args.function == "causal":
        function = _causal_over_the_row
    else:
        function = _import(args.function)
    report = verify.check_attention(function, lengths, tail=0, **pattern)
    figure = plotting.plot_influence(report, title=args.title)
    return figure, str(report), 0 if report.passed else 1


def _causal_over_the_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _import(text: str) -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"--function must be packattn, causal or MODULE:NAME, got {text!r}")
    sys.path.insert(0, "")  # as python -m does, so that a module beside the user is found
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"--function must name something callable, {text} is {type(function).__name__}")
    return function


def _window(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < -1:
        raise argparse.ArgumentTypeError(f"wanted LEFT or LEFT,RIGHT, whole numbers from -1, got {text!r}")
    return numbers[0], numbers[-1]
