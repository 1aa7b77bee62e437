"""The demo's proof: one trained model, one packed row, three kinds of attention, and what each lets through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packattn import Packing, verify
from packattn.cli import demo_model
from packattn.cli.progress import Progress

Run = Callable[[demo_model.Decoder, Tensor, Packing], Tensor]


@dataclass(frozen=True)
class Variant:
    """A way to run packed rows. `run(model, input_ids [1, T], packing)` returns logits [1, T, V]."""

    name: str
    mask: str
    positions: str
    run: Run
    leaks: bool  # whether it must be seen to leak; a probe that misses this has shown nothing


@dataclass(frozen=True)
class Proof:
    variant: Variant
    report: verify.ProbeReport

    @property
    def verdict(self) -> str:
        if self.report.passed:
            return "clean"
        return "LEAKS" if self.report.leak > 0 else "FAILS"


def _running_positions(model: demo_model.Decoder, input_ids: Tensor, packing: Packing) -> Tensor:
    logits: Tensor = model(input_ids, torch.arange(packing.total)[None], demo_model.causal)
    return logits


def _reset_positions(model: demo_model.Decoder, input_ids: Tensor, packing: Packing) -> Tensor:
    logits: Tensor = model(input_ids, packing.position_ids[None], demo_model.causal)
    return logits


def _packattn(model: demo_model.Decoder, input_ids: Tensor, packing: Packing) -> Tensor:
    logits: Tensor = model(input_ids[0], packing.position_ids, demo_model.packed(packing))
    return logits[None]


def variants() -> list[Variant]:
    return [
        Variant("(a) plain causal", "causal over the row", "running", _running_positions, leaks=True),
        Variant("(b) positions reset", "causal over the row", "reset", _reset_positions, leaks=True),
        Variant("(c) packattn", "causal in each document", "reset", _packattn, leaks=False),
    ]


def choose_row(rows: Sequence[Sequence[Tensor]], documents: int) -> list[Tensor]:
    """The row with about this many documents: enough to see leaks between, few enough to look at."""
    several = [list(row) for row in rows if len(row) > 1]
    if not several:
        raise ValueError("the proof needs a row with at least two documents, got only rows of one; raise the capacity")
    return min(several, key=lambda row: abs(len(row) - documents))


def prove(model: demo_model.Decoder, documents: Sequence[Tensor], seed: int) -> list[Proof]:
    """packattn.verify.probe of the model in each variant, on the same documents in one row."""
    proofs = []
    with Progress(len(variants()), "variant", lines=0) as progress:
        for variant in variants():
            report = verify.probe(
                model, documents, run=variant.run, embedding=model.embedding, seed=seed, locate=int(variant.leaks)
            )
            proofs.append(Proof(variant, report))
            progress.advance(variant.name)
    return proofs


def judge(proofs: Sequence[Proof]) -> tuple[bool, str]:
    """Whether the demo shows what it should, and the sentence that says so."""
    blind = [proof.variant.name for proof in proofs if proof.variant.leaks and not proof.report.leak > 0]
    if blind:
        return False, f"The probe saw no leak in {' and '.join(blind)}, which must leak: it could not see anything."
    for proof in proofs:
        report = proof.report
        if proof.variant.leaks or report.passed:
            continue
        if not report.deterministic:
            return (
                False,
                "Two runs of the model with packattn on the same input differ; nothing can be said about leaks.",
            )
        if report.leak != 0:
            return False, f"packattn LEAKS: replacing a document moved another one's logits by {report.leak:.3g}."
        if report.gradient_leak:
            return False, f"packattn LEAKS in the backward: gradient {report.gradient_leak:.3g} in another document."
        return False, (
            f"packattn fails: packed logits differ from unpacked ones by {report.max_relative_error:.3g} of the largest "
            f"logit, wanted at most {report.tolerance:g}."
        )
    return True, "packattn leaks exactly 0 in the forward and the backward; the two usual shortcuts leak."
