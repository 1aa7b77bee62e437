"""Training the demo's model on packed rows."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packattn.cli import demo_data, demo_model
from packattn.cli.progress import Progress


@dataclass(frozen=True)
class Training:
    """What a training run showed. Losses are nats per byte; the first and last are means over a tenth of the steps."""

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    held_out_before: float
    held_out_after: float
    tokens: int  # real ones, without padding

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the next token, summed. logits [..., S, V]; labels [..., S], -100 where nothing is to be predicted."""
    logits, labels = logits[..., :-1, :], labels[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def packed_loss(model: demo_model.Decoder, rows: demo_data.PackedRows) -> Tensor:
    """Mean loss per predicted token of packed rows, with packattn."""
    logits = model(rows.tokens, rows.packing.position_ids, demo_model.packed(rows.packing))
    return loss_sum(logits, rows.labels) / (rows.labels != -100).sum()


def train(
    model: demo_model.Decoder,
    rows: Sequence[Sequence[Tensor]],
    held_out: demo_data.PackedRows,
    *,
    capacity: int,
    steps: int,
    rows_per_step: int,
    learning_rate: float,
    seed: int,
) -> Training:
    """AdamW with a short warm-up and a cosine decay over `steps` batches of `rows`, shuffled by `seed`."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))),
    )
    before = evaluate(model, held_out)
    order = _endless_order(len(rows), seed)
    losses: list[float] = []
    tokens = 0
    begin = time.perf_counter()
    with Progress(steps, "step") as progress:
        for _ in range(steps):
            batch = demo_data.pack_rows([rows[next(order)] for _ in range(rows_per_step)], capacity)
            loss = packed_loss(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            tokens += batch.real_tokens
            speed = tokens / (time.perf_counter() - begin)
            progress.advance(f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
    seconds = time.perf_counter() - begin
    tail = max(1, steps // 10)
    return Training(
        steps=steps,
        seconds=seconds,
        first_loss=losses[0],
        last_loss=sum(losses[-tail:]) / tail,
        held_out_before=before,
        held_out_after=evaluate(model, held_out),
        tokens=tokens,
    )


@torch.no_grad()
def evaluate(model: demo_model.Decoder, rows: demo_data.PackedRows) -> float:
    return packed_loss(model, rows).item()


def _endless_order(count: int, seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    while True:
        yield from generator.sample(range(count), count)
