"""Train a small model on packed docstrings, time it, and prove that no document sees another. Takes one to two minutes."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packattn.cli import (
    demo_corpus,
    demo_data,
    demo_model,
    demo_picture,
    demo_proof,
    demo_speed,
    demo_train,
    info,
    tables,
)

SUMMARY = "train on packed rows and prove that nothing leaks (one to two minutes)"


@dataclass(frozen=True)
class Settings:
    """How large the demo is."""

    capacity: int = 2048
    steps: int = 120
    rows_per_step: int = 1
    learning_rate: float = 3e-3
    max_documents: int | None = None
    held_out: int = 60  # documents
    speed_rows: int = 3
    speed_repeats: int = 3
    model: demo_model.Config = field(default_factory=demo_model.Config)


FULL = Settings()
QUICK = Settings(
    capacity=512,
    steps=12,
    rows_per_step=2,
    learning_rate=1e-2,
    max_documents=700,
    held_out=30,
    speed_rows=2,
    speed_repeats=1,
    model=demo_model.Config(width=64, layers=2, heads=4, head_dim=16, hidden=176),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a smaller model and corpus, about ten seconds")
    parser.add_argument("--steps", type=_positive, help=f"training steps (default {FULL.steps})")
    parser.add_argument("--seed", type=_seed, default=0, help="of every random choice (default 0)")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--picture",
        type=_output_file,
        default=Path("packattn-demo.png"),
        metavar="FILE",
        help="where the picture goes (default %(default)s)",
    )
    picture.add_argument("--no-picture", action="store_const", const=None, dest="picture", help="draw no picture")
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="write the results as JSON too")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 only if packattn's leak is exactly 0 and the probe saw the other variants leak; 1 otherwise."""
    settings = QUICK if args.quick else FULL
    if args.steps is not None:
        settings = replace(settings, steps=args.steps)
    begin = time.perf_counter()
    try:
        results, passed, sentence = _demo(settings, args.seed, args.picture)
    except (demo_corpus.CorpusError, demo_speed.WrongLossError) as error:
        print(f"packattn demo: {error}", file=sys.stderr)
        return 1
    results["seconds"] = time.perf_counter() - begin
    results["passed"] = passed
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nResult after {results['seconds']:.0f} s: {sentence}")
    return 0 if passed else 1


def _demo(settings: Settings, seed: int, picture: Path | None) -> tuple[dict[str, Any], bool, str]:
    facts = info.collect()
    print(f"packattn {facts['version']}, torch {facts['torch']}, {facts['threads']} threads, {_kernels(facts)}")

    _heading(1, "Read")
    corpus = demo_corpus.load(max_documents=settings.max_documents)
    training, held_out = corpus.split(settings.held_out, seed)
    documents, held_out_documents = ([demo_corpus.encode(text) for text in part] for part in (training, held_out))
    lengths = sorted(map(len, documents))
    print(
        f"  {tables.count(len(corpus.documents))} docstrings of the Python standard library, byte by byte; {len(held_out)} held out.\n"
        f"  Tokens in a document: median {statistics.median(lengths):.0f}, 99th percentile "
        f"{lengths[len(lengths) * 99 // 100]:,}, longest {lengths[-1]:,}."
    )

    _heading(2, "Pack")
    rows = demo_data.assign(documents, settings.capacity)
    fill = sum(lengths) / (len(rows) * settings.capacity)
    padded_fill = _padded_fill(documents)
    print(
        f"  {tables.count(len(documents))} documents in {tables.count(len(rows))} rows of {settings.capacity:,} tokens: "
        f"{fill:.1%} full.\n"
        f"  Padded batches of {demo_speed.PADDED_BATCH} documents would be {padded_fill:.1%} full."
    )

    _heading(3, "Train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = demo_model.Decoder(settings.model)
    held_out_rows = demo_data.assign(held_out_documents, settings.capacity)
    print(
        f"  A Llama-style model with {tables.count(sum(p.numel() for p in model.parameters()))} parameters; loss in nats per byte."
    )
    training_result = demo_train.train(
        model,
        rows,
        demo_data.pack_rows(held_out_rows, settings.capacity),
        capacity=settings.capacity,
        steps=settings.steps,
        rows_per_step=settings.rows_per_step,
        learning_rate=settings.learning_rate,
        seed=seed,
    )
    print(
        f"  Held-out loss {training_result.held_out_before:.3f} before, {training_result.held_out_after:.3f} after "
        f"{settings.steps} steps ({training_result.seconds:.0f} s)."
    )

    _heading(4, "Time one training step (forward and backward) of the same documents")
    chosen = random.Random(seed).sample(range(len(rows)), settings.speed_rows)
    speeds = demo_speed.measure(
        model,
        demo_data.pack_rows([rows[i] for i in chosen], settings.capacity),
        repeats=settings.speed_repeats,
        seed=seed,
    )
    print(_speed_table(speeds))

    row = demo_proof.choose_row(held_out_rows, documents=6)
    _heading(5, f"Probe the trained model on one row of {len(row)} held-out documents")
    proofs = demo_proof.prove(model, row, seed)
    print(_proof_table(proofs))
    print(
        "  leak: largest change of a logit when another document is replaced; gradient: the same in the backward;\n"
        "  error: largest difference of a logit between the packed document and the document alone."
    )
    _print_example(proofs)
    if picture is not None:
        print(f"\n{demo_picture.draw(picture, row, proofs)}")
    passed, sentence = demo_proof.judge(proofs)
    if passed:
        ratio = speeds[0].tokens_per_second / speeds[1].tokens_per_second
        sentence += f"\n  Packed rows train at {ratio:.1f} times the tokens/s of padded batches."
    results = {
        "version": facts["version"],
        "torch": facts["torch"],
        "threads": facts["threads"],
        "isa": facts["cpu"]["isa"] if facts["native"] else None,
        "seed": seed,
        "documents": len(corpus.documents),
        "rows": len(rows),
        "fill": fill,
        "padded_fill": padded_fill,
        "training": {**asdict(training_result), "tokens_per_second": training_result.tokens_per_second},
        "speed": [
            {**asdict(speed), "tokens_per_second": speed.tokens_per_second, "fill": speed.fill} for speed in speeds
        ],
        "proof": [_proof_dict(proof) for proof in proofs],
    }
    return results, passed, sentence


def _padded_fill(documents: Sequence[Tensor]) -> float:
    size = demo_speed.PADDED_BATCH
    batches = [documents[i : i + size] for i in range(0, len(documents), size)]
    return sum(map(len, documents)) / sum(len(batch) * max(map(len, batch)) for batch in batches)


def _speed_table(speeds: Sequence[demo_speed.Speed]) -> str:
    packed = speeds[0].tokens_per_second
    rows = [
        (
            speed.name,
            f"{speed.fill:.1%}",
            f"{1000 * speed.median_seconds:,.0f}",
            tables.count(speed.tokens_per_second),
            "" if speed is speeds[0] else f"{packed / speed.tokens_per_second:.1f}x",
            f"{speed.loss:.4f}",
        )
        for speed in speeds
    ]
    return tables.render(
        ("attention and batch", "fill", "ms", "tokens/s", "packattn's gain", "loss"), rows, align="<>>>>>"
    )


def _proof_table(proofs: Sequence[demo_proof.Proof]) -> str:
    rows = []
    for proof in proofs:
        report = proof.report
        gradient = "-" if report.gradient_leak is None else tables.scientific(report.gradient_leak)
        error = tables.scientific(report.max_error)
        rows.append(
            (
                proof.variant.name,
                proof.variant.mask,
                proof.variant.positions,
                tables.scientific(report.leak),
                gradient,
                error,
                proof.verdict,
            )
        )
    return tables.render(
        ("variant", "mask", "positions", "leak", "gradient", "error", "verdict"), rows, align="<<<>>><"
    )


def _print_example(proofs: Sequence[demo_proof.Proof]) -> None:
    """The largest leak that is left when only positions are reset, or packattn's own if it has one, in words."""
    for proof in reversed(proofs):
        if proof.report.leaks:
            print(
                textwrap.fill(
                    f"{proof.variant.name}: {proof.report.leaks[0].text}.",
                    110,
                    initial_indent="  ",
                    subsequent_indent="  ",
                )
            )
            return


def _proof_dict(proof: demo_proof.Proof) -> dict[str, Any]:
    variant = proof.variant
    return {"variant": variant.name, "mask": variant.mask, "positions": variant.positions, **proof.report.to_dict()}


def _kernels(facts: dict[str, Any]) -> str:
    if facts["native"]:
        return f"compiled kernels ({facts['cpu']['isa'] or 'instruction set unknown'})"
    return f"NO compiled kernels, plain PyTorch instead\n  Why: {facts['libraries'][0]['missing']}"


def _heading(number: int, title: str) -> None:
    print(f"\n{number}. {title}", flush=True)


def _output_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():  # better now than after a minute of work
        raise argparse.ArgumentTypeError(f"wanted a file in a folder that exists, got {text}")
    return path


def _positive(text: str) -> int:
    return _whole(text, 1, 10**9)


def _seed(text: str) -> int:
    return _whole(text, 0, 2**32 - 1)


def _whole(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"wanted a whole number from {low} to {high}, got {text}")
    return int(text)
