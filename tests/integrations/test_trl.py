"""TRL's SFTTrainer: packed with packattn, and the same documents unpacked, are the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

STEPS = 5


def examples() -> Any:
    """24 documents. The first token is no target: unpacked batches would count it among the labels though the shift
    drops it, and the mean would be over another number of tokens."""
    random = np.random.RandomState(0)
    ids = [random.randint(3, 61, n).tolist() for n in random.randint(2, 20, 24)]
    return datasets.Dataset.from_dict({"input_ids": ids, "completion_mask": [[0] + [1] * (len(x) - 1) for x in ids]})


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(61)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        pad_token="w0",
        eos_token="w2",
        unk_token="w3",
    )


def train(folder: Path, attn: str, name: str = "llama", **options: Any) -> tuple[Any, list[float]]:
    dataset = examples()
    rows = len(trl.pack_dataset(dataset, 40)) if options.get("packing") else len(dataset)
    model = FAMILIES[name].build(attn)
    config = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        optim="sgd",
        learning_rate=0.3,
        lr_scheduler_type="constant",
        max_length=40,
        completion_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        gradient_accumulation_steps=rows,  # all of the data in every step, so that its order does not matter
        **options,
    )
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer())
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_is_unpacked(hf: Any, tmp_path: Path, name: str) -> None:
    unpacked, losses = train(tmp_path, "eager", name)
    packed, packed_losses = train(tmp_path, "packattn", name, packing=True)
    before = FAMILIES[name].build("eager")
    assert len(losses) == len(packed_losses) == STEPS
    assert losses[-1] < losses[0] - 0.05, "it learns"
    np.testing.assert_allclose(packed_losses, losses, rtol=1e-4)
    for (n, p), q, r in zip(packed.named_parameters(), unpacked.parameters(), before.parameters(), strict=True):
        step = float((q - r).detach().abs().max())
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-4 * step + 1e-6, msg=lambda m, n=n: f"{n}: {m}")


def test_eager_packed_is_something_else(hf: Any, tmp_path: Path) -> None:
    """gpt-oss in TRL's packing with eager attention trains on other documents: the test above can fail."""
    _, losses = train(tmp_path, "eager", "gpt_oss")
    _, leaking = train(tmp_path, "eager", "gpt_oss", packing=True)
    _, packed = train(tmp_path, "packattn", "gpt_oss", packing=True)
    assert abs(leaking[0] - losses[0]) > 1e-3
    np.testing.assert_allclose(packed, losses, rtol=1e-4)
