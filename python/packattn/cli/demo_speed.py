"""Throughput of a training step on the same documents: packattn, padded batches, and a dense document mask."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import packattn
from packattn.cli import demo_data, demo_model
from packattn.cli.demo_train import loss_sum, packed_loss
from packattn.cli.progress import Progress

PADDED_BATCH = 8  # documents to a padded batch
_TOLERANCE = 1e-4  # of the loss; float32 sums in another order differ by far less


@dataclass(frozen=True)
class Speed:
    """Forward and backward over the same documents. `tokens` counts real tokens; `computed` those that the step ran on."""

    name: str
    median_seconds: float
    tokens: int
    computed: int
    loss: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median_seconds

    @property
    def fill(self) -> float:
        return self.tokens / self.computed


class WrongLossError(RuntimeError):
    """Two ways of computing the same loss disagree, so that their times would mean nothing."""


def measure(model: demo_model.Decoder, rows: demo_data.PackedRows, *, repeats: int, seed: int) -> list[Speed]:
    """Check that all three give the same loss, then time them in turns and take medians.

    Each step includes what it makes from the boundaries: the packing, or the dense mask. The padded batches hold the same
    documents, in an order shuffled by `seed`.
    """
    padded = demo_data.pad(random.Random(seed).sample(rows.documents, len(rows.documents)), PADDED_BATCH)
    predicted = sum(len(document) - 1 for document in rows.documents)

    def step_packattn() -> float:
        packing = packattn.Packing.from_segment_ids(rows.packing.segment_ids, pad_id=-1)
        fresh = demo_data.PackedRows(rows.tokens, rows.labels, packing, rows.documents, rows.rows)
        loss = packed_loss(model, fresh)
        loss.backward()
        return loss.item()

    def step_padded() -> float:
        total = 0.0
        for batch in padded:
            positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
            logits = model(batch.tokens, positions, demo_model.causal)
            loss = loss_sum(logits, batch.labels) / predicted
            loss.backward()
            total += loss.item()
        return total

    def step_dense() -> float:
        tokens, labels, positions, segments = (
            x.view(rows.rows, -1)
            for x in (rows.tokens, rows.labels, rows.packing.position_ids, rows.packing.segment_ids)
        )
        size = tokens.shape[1]
        # padding sees padding before it: a row that sees nothing is not defined for every implementation
        same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
        mask = (same & torch.ones(size, size, dtype=torch.bool).tril()).unsqueeze(1)
        loss = loss_sum(model(tokens, positions, demo_model.masked(mask)), labels) / predicted
        loss.backward()
        return loss.item()

    computed = sum(batch.tokens.numel() for batch in padded)
    steps: list[tuple[str, int, Callable[[], float]]] = [
        ("packattn, packed rows", rows.tokens.numel(), step_packattn),
        ("SDPA, padded batches", computed, step_padded),
        ("SDPA, dense document mask", rows.tokens.numel(), step_dense),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in steps}
    losses: dict[str, float] = {}
    with Progress((repeats + 1) * len(steps), "run", lines=0) as progress:
        for repeat in range(repeats + 1):
            for name, _, step in steps:
                model.zero_grad(set_to_none=True)
                begin = time.perf_counter()
                losses[name] = step()
                if repeat:  # the first round warms up and is compared, not timed
                    seconds[name].append(time.perf_counter() - begin)
                progress.advance(name)
            if not repeat:
                _compare(losses)
    model.zero_grad(set_to_none=True)
    return [
        Speed(name, statistics.median(seconds[name]), rows.real_tokens, computed, losses[name])
        for name, computed, _ in steps
    ]


def _compare(losses: dict[str, float]) -> None:
    wanted = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - wanted) <= _TOLERANCE * abs(wanted):
            raise WrongLossError(f"{name}: wanted the loss {wanted:.6f} within {_TOLERANCE:g}, got {loss:.6f}")
