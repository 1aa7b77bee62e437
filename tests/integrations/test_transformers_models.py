"""Whole models: packed logits and parameter gradients are those of the documents alone, and nothing leaks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from families import FAMILIES, documents, offsets, positions, segments

import packattn

pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

LENGTHS = (5, 4, 1, 7)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def packed_arguments(name: str) -> dict[str, Any]:
    """position_ids alone for decoders; encoders do not hand them on, so seq_idx says where documents lie."""
    arguments: dict[str, Any] = {"position_ids": positions(LENGTHS)[None]}
    if FAMILIES[name].causal:
        return {**arguments, "use_cache": False}
    return {**arguments, "seq_idx": segments(LENGTHS)[None]}


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_is_alone(hf: Any, name: str) -> None:
    docs = documents(LENGTHS)
    model = FAMILIES[name].build()
    row = torch.cat(docs)[None]
    weight = torch.randn(row.shape[1], model.config.vocab_size, generator=torch.Generator().manual_seed(3))

    packed = model(row, **packed_arguments(name)).logits[0]
    (packed * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    oracle = FAMILIES[name].build("eager")  # no code of packattn on this side
    oracle.load_state_dict(model.state_dict())
    alone = torch.cat([oracle(d[None]).logits[0] for d in docs])
    (alone * weight).sum().backward()

    torch.testing.assert_close(packed, alone, **TOLERANCE)
    assert len(gradients) > 10
    # Some gradients are 0 but for rounding (the bias of keys cancels in the softmax): the scale is that of the model.
    scale = max(float(p.grad.abs().max()) for p in oracle.parameters() if p.grad is not None)
    for n, p in oracle.named_parameters():
        if p.grad is None:
            assert n not in gradients
            continue
        torch.testing.assert_close(gradients[n], p.grad, rtol=2e-4, atol=5e-6 * scale, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", FAMILIES)
def test_replacing_a_document_moves_no_bit_of_another(hf: Any, name: str) -> None:
    docs, other = documents(LENGTHS), documents(LENGTHS, seed=7)
    model = FAMILIES[name].build()
    arguments = packed_arguments(name)
    with torch.no_grad():
        base = model(torch.cat(docs)[None], **arguments).logits[0].split(LENGTHS)
        for a in range(len(docs)):
            row = torch.cat([*docs[:a], other[a], *docs[a + 1 :]])[None]
            moved = model(row, **arguments).logits[0].split(LENGTHS)
            for b, (new, old) in enumerate(zip(moved, base, strict=True)):
                assert torch.equal(new, old) == (a != b), f"document {b} when document {a} is replaced"


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].causal])
def test_batch_of_packed_rows_with_a_tail(hf: Any, name: str) -> None:
    """Two rows, packed differently, one with padding at its end in every convention that collators use."""
    model = FAMILIES[name].build()
    first, second = (5, 4, 1, 2), (3, 7)
    rows = [torch.cat(documents(first)), torch.cat([*documents(second, seed=5), torch.zeros(2, dtype=torch.long)])]
    tails = {"zeros": [0, 0], "arange": [0, 1], "minus one": [-1, -1], "going on": [7, 8]}
    with torch.no_grad():
        alone = [[model(d[None]).logits[0] for d in docs] for docs in (documents(first), documents(second, seed=5))]
        for tail, values in tails.items():
            pos = torch.stack([positions(first), torch.cat([positions(second), torch.tensor(values)])])
            packed = model(torch.stack(rows), position_ids=pos, use_cache=False).logits
            torch.testing.assert_close(packed[0], torch.cat(alone[0]), **TOLERANCE, msg=lambda m, t=tail: f"{t}: {m}")
            torch.testing.assert_close(
                packed[1, :10], torch.cat(alone[1]), **TOLERANCE, msg=lambda m, t=tail: f"{t}: {m}"
            )


class TestReported:
    """The rows of reported bugs: a 2-layer random Llama, documents of 5 and 4 tokens, positions reset."""

    WAYS: ClassVar[dict[str, dict[str, Any]]] = {
        "position_ids, default cache": {"position_ids": positions((5, 4))[None]},
        "position_ids, all-ones mask": {
            "position_ids": positions((5, 4))[None],
            "attention_mask": torch.ones(1, 9).long(),
        },
        "position_ids, mask of ids": {
            "position_ids": positions((5, 4))[None],
            "attention_mask": segments((5, 4), 1)[None],
        },
        "cu_seq_lens": {"cu_seq_lens_q": offsets((5, 4)), "cu_seq_lens_k": offsets((5, 4))},
        "seq_idx": {"seq_idx": segments((5, 4))[None]},
    }

    @staticmethod
    def leak(model: Any, way: dict[str, Any]) -> tuple[float, float]:
        """(what moves in B when A is replaced, largest difference between B packed and alone)."""
        a, b, other = *documents((5, 4)), documents((5,), seed=7)[0]
        with torch.no_grad():
            one, two = (model(torch.cat([x, b])[None], **way).logits[0, 5:] for x in (a, other))
            alone = model(b[None], use_cache=False).logits[0]
        return float((one - two).abs().max()), float((one - alone).abs().max())

    @pytest.mark.parametrize("attn", ["sdpa", "eager"])
    @pytest.mark.parametrize("way", WAYS)
    def test_the_others_leak(self, hf: Any, attn: str, way: str) -> None:
        leak, _ = self.leak(FAMILIES["llama"].build(attn), self.WAYS[way])
        assert leak > 0.1

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.filterwarnings("ignore:packattn. the batch is packed:RuntimeWarning")
    def test_packattn_does_not(self, hf: Any, way: str) -> None:
        leak, error = self.leak(FAMILIES["llama"].build(), self.WAYS[way])
        assert leak == 0
        assert error < 1e-4

    @pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3", "gpt_oss"])
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.filterwarnings("ignore:packattn. the batch is packed:RuntimeWarning")
    def test_nor_in_the_other_decoders(self, hf: Any, name: str, way: str) -> None:
        leak, error = self.leak(FAMILIES[name].build(), self.WAYS[way])
        assert leak == 0
        assert error < 1e-4

    def test_token_mean_loss(self, hf: Any) -> None:
        """The mean over the tokens of a packed batch is that over the documents alone, with the boundary label masked."""
        model = FAMILIES["llama"].build()
        docs = documents((5, 4))
        packing = packattn.Packing.from_lengths([5, 4])
        row = torch.cat(docs)[None]
        with torch.no_grad():
            loss = model(
                row, labels=packattn.mask_labels(row, packing), position_ids=positions((5, 4))[None], use_cache=False
            ).loss
            losses = [model(d[None], labels=d[None]).loss for d in docs]
            crossing = model(row, labels=row, position_ids=positions((5, 4))[None], use_cache=False).loss
        torch.testing.assert_close(loss, (losses[0] * 4 + losses[1] * 3) / 7)
        assert abs(crossing - loss) > 1e-3


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama4"])
@pytest.mark.filterwarnings("ignore:packattn. the batch is packed:RuntimeWarning")
def test_prepare_serves_models_that_keep_positions_to_themselves(hf: Any, name: str) -> None:
    docs = documents(LENGTHS)
    row = torch.cat(docs)[None]
    model = FAMILIES[name].build()
    with torch.no_grad():
        alone = torch.cat([model(d[None]).logits[0] for d in docs])
        unprepared = model(row, position_ids=positions(LENGTHS)[None]).logits[0]
        remove = hf.prepare(model)
        for way in (
            {"position_ids": positions(LENGTHS)[None]},
            {"attention_mask": segments(LENGTHS, 1)[None].long()},
            {"cu_seq_lens_q": offsets(LENGTHS), "cu_seq_lens_k": offsets(LENGTHS)},
            {"seq_idx": segments(LENGTHS)[None]},
            {"packing": packattn.Packing.from_lengths(LENGTHS)},
        ):
            torch.testing.assert_close(
                model(row, **way).logits[0], alone, **TOLERANCE, msg=lambda m, w=way: f"{list(w)}: {m}"
            )
        remove()
        assert torch.equal(model(row, position_ids=positions(LENGTHS)[None]).logits[0], unprepared)
