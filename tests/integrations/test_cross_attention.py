"""Encoder-decoder models: served with one document per row, refused with several. Models that never call packattn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import COMMON, documents, offsets, positions, segments

import packattn
from packattn import verify

transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

LENGTHS = (5, 4)
ENCODER_DECODER = ("bart", "t5gemma")


def build(name: str, attn: str) -> Any:
    torch.manual_seed(0)
    if name == "bart":
        config = transformers.BartConfig(
            vocab_size=61,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            dropout=0.0,
            max_position_embeddings=64,
            init_std=0.3,
        )
        config._attn_implementation = attn
        return transformers.BartForConditionalGeneration(config).eval()
    sides = {
        side: {**COMMON, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "dropout_rate": 0.0}
        for side in ("encoder", "decoder")
    }
    config = transformers.T5GemmaConfig(**sides, vocab_size=61, dropout_rate=0.0)
    config._attn_implementation = attn
    return transformers.T5GemmaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", ENCODER_DECODER)
@pytest.mark.parametrize("decoded", [7, 9])
def test_padded_batches_are_as_with_eager(hf: Any, name: str, decoded: int) -> None:
    """T5Gemma's encoder counts its window otherwise than its layers say: the mask is right."""
    g = torch.Generator().manual_seed(1)
    ids, target = (torch.randint(3, 61, (2, n), generator=g) for n in (9, decoded))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    one, two = (
        build(name, attn)(ids, attention_mask=mask, decoder_input_ids=target).logits for attn in ("packattn", "eager")
    )
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_generate(hf: Any) -> None:
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    one, two = (build("bart", attn).generate(ids, **arguments) for attn in ("packattn", "eager"))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ENCODER_DECODER)
@pytest.mark.parametrize("told", ["packing", "cu_seq_lens", "seq_idx", "positions"])
def test_documents_are_refused(hf: Any, name: str, told: str) -> None:
    row = torch.cat(documents(LENGTHS))[None]
    arguments: dict[str, Any] = {
        "packing": {"packing": packattn.Packing.from_lengths(LENGTHS)},
        "cu_seq_lens": {"cu_seq_lens_q": offsets(LENGTHS), "cu_seq_lens_k": offsets(LENGTHS)},
        "seq_idx": {"seq_idx": segments(LENGTHS)[None]},
        "positions": {("decoder_position_ids" if name == "t5gemma" else "position_ids"): positions(LENGTHS)[None]},
    }[told]
    with pytest.raises(ValueError, match="a model with cross-attention, where .* cannot be honoured"):
        build(name, "packattn")(row, decoder_input_ids=row, **arguments)


def test_positions_of_one_document_are_not(hf: Any) -> None:
    row = torch.cat(documents(LENGTHS))[None]
    model = build("t5gemma", "packattn")
    one = model(row, decoder_input_ids=row).logits
    assert torch.equal(model(row, decoder_input_ids=row, decoder_position_ids=torch.arange(9)[None]).logits, one)


def test_restarts_are_refused_where_the_keys_are_others(hf: Any) -> None:
    """A layer that is not causal and has other keys than queries, but no name by which it could be known."""
    from types import SimpleNamespace

    q, k, v = (torch.randn(1, 2, n, 8) for n in (6, 4, 4))
    layer = SimpleNamespace(is_causal=False)
    hf.attention(layer, q, k, v, None, position_ids=torch.arange(6)[None])
    with pytest.raises(ValueError, match="position_ids restart, but say nothing about .* the 4 keys"):
        hf.attention(layer, q, k, v, None, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_restarts_are_refused_while_compiling(hf: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(build("bart", "packattn"), backend="aot_eager")
    row = torch.cat(documents(LENGTHS))[None]
    with torch.no_grad():
        compiled(row, decoder_input_ids=row, position_ids=torch.arange(9)[None])
        with pytest.raises((ValueError, RuntimeError), match="must not restart in cross-attention|cannot be honoured"):
            compiled(row, decoder_input_ids=row, position_ids=positions(LENGTHS)[None])


def test_prepare_and_check_say_so(hf: Any) -> None:
    model = build("bart", "eager")
    with pytest.raises(ValueError, match="BartForConditionalGeneration is an encoder-decoder model"):
        hf.prepare(model)
    report = verify.check_model(model, documents((5, 4)), implementations=("packattn",))
    assert {row.verdict for row in report.rows} == {"not run"}
    assert "encoder-decoder" in report.rows[0].note


@pytest.mark.parametrize("compiled", [False, True])
def test_model_that_would_not_call_packattn(hf: Any, compiled: bool) -> None:
    """BLOOM takes no mask for "every key is visible"; it must be refused in a compiled model too."""
    torch._dynamo.reset()
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="packattn")
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match="BloomConfig compute attention on their own"):
        call(torch.randint(3, 61, (1, 9)))
