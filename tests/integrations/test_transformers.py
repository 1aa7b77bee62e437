"""transformers: every way of calling a model, generation, compilation, and what is refused."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, documents, offsets, positions, roberta, segments

import packattn

transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")

LENGTHS = (5, 4, 1, 7)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def layer(**attributes: Any) -> Any:
    return SimpleNamespace(**{"is_causal": True, **attributes})


def heads(batch: int = 1, queries: int = 6, keys: int | None = None, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    return tuple(torch.randn(batch, h, n, 8, generator=g) for h, n in ((4, queries), (2, keys), (2, keys)))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, Q, Hq, D] under a bool mask [B, Q, K]; rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)
    return (score.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


# ---- registration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_packattn", "my_sdpa", "flex_attention", "a/b", "", "eager"])
def test_names_that_transformers_treats_specially(hf: Any, name: str) -> None:
    with pytest.raises(ValueError, match="name must not"):
        hf.register(name)


def test_as_name_eager_is_refused(hf: Any) -> None:
    with pytest.raises(ValueError, match="as_name must be a registered implementation"):
        hf.register(as_name="eager")


def test_as_name_takes_and_gives_back(hf: Any) -> None:
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    alone = FAMILIES["llama"].build("eager")(documents(LENGTHS)[-1][None]).logits[0]
    model = FAMILIES["llama"].build("sdpa")
    hf.register(as_name="sdpa")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            taken = model(row, position_ids=pos).logits[0, -7:]
    finally:
        hf.unregister("sdpa")
    torch.testing.assert_close(taken, alone, **TOLERANCE)
    assert (model(row, position_ids=pos).logits[0, -7:] - alone).abs().max() > 0.1, "sdpa itself is back"
    with pytest.raises(ValueError, match="must be one that packattn replaced"):
        hf.unregister("sdpa")


def test_model_that_never_asks_for_its_attention_function(hf: Any) -> None:
    """BLOOM would take "no mask" for "no causality"."""
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="packattn")
    with pytest.raises(ValueError, match="BloomConfig compute attention on their own"):
        model(documents((5,))[0][None])


def test_from_config_and_set_attn_implementation(hf: Any) -> None:
    config = FAMILIES["qwen3"].build("eager").config
    assert transformers.AutoModelForCausalLM.from_config(config, attn_implementation="packattn")
    model = FAMILIES["qwen3"].build("eager")
    model.set_attn_implementation("packattn")
    assert model.config._attn_implementation == "packattn"


def test_from_pretrained(hf: Any, tmp_path: Any) -> None:
    FAMILIES["llama"].build().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="packattn")
    assert model.config._attn_implementation == "packattn"


# ---- precedence and contradictions -----------------------------------------------------------------------------


def test_cu_seq_lens_come_before_segment_ids_before_positions(hf: Any) -> None:
    q, k, v = heads(queries=6)
    arguments = {
        "packing": packattn.Packing.from_lengths([1, 5]),
        "cu_seq_lens_q": torch.tensor([0, 2, 6]),
        "cu_seq_lens_k": torch.tensor([0, 2, 6]),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]]),
    }
    for first, used in ((1, {}), (2, {"packing"}), (3, {"packing", "cu_seq_lens_q", "cu_seq_lens_k"})):
        out, weights = hf.attention(layer(), q, k, v, None, **{n: x for n, x in arguments.items() if n not in used})
        block = torch.block_diag(torch.ones(first, first), torch.ones(6 - first, 6 - first)).tril().bool()[None]
        torch.testing.assert_close(out, dense(q, k, v, block))
        assert weights is None
    out, _ = hf.attention(layer(), q, k, v, None, position_ids=arguments["position_ids"])
    block = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).tril().bool()[None]
    torch.testing.assert_close(out, dense(q, k, v, block))


def test_explicit_offsets_allow_positions_that_jump(hf: Any) -> None:
    """PoSE: positions jump inside a document; cu_seq_lens say that it is one, in windowed layers too."""
    jumping = torch.tensor([[0, 1, 7, 8, 9, 0, 1, 5]])
    cu = torch.tensor([0, 5, 8], dtype=torch.int32)
    for name in ("llama", "mistral"):
        model = FAMILIES[name].build()
        row = torch.cat(documents((5, 3)))[None]
        with torch.no_grad():
            packed = model(row, position_ids=jumping, cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False).logits[0]
            one = torch.tensor([0, 5], dtype=torch.int32)
            alone = model(
                row[:, :5], position_ids=jumping[:, :5], cu_seq_lens_q=one, cu_seq_lens_k=one, use_cache=False
            )
        torch.testing.assert_close(packed[:5], alone.logits[0], **TOLERANCE)


def test_cache_and_all_ones_mask_are_said_once(hf: Any) -> None:
    model = FAMILIES["llama"].build()
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(row, position_ids=pos, use_cache=True)
            model(row, position_ids=pos, attention_mask=torch.ones_like(row), use_cache=False)
    said = [str(w.message) for w in caught if "packed" in str(w.message)]
    assert len(said) == 2
    assert any("use_cache is on" in m for m in said)
    assert any("attention_mask of ones" in m for m in said)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_ordinary_use_says_nothing(hf: Any, name: str) -> None:
    model = FAMILIES[name].build()
    row = torch.cat(documents(LENGTHS))[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model(row, attention_mask=torch.ones_like(row))
        model(row, position_ids=positions(LENGTHS)[None], use_cache=False)
        padded = torch.ones_like(row)
        padded[:, :4] = 0
        model.generate(row, attention_mask=padded, max_new_tokens=2, do_sample=False)


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias"),
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"output_attentions": True}, "output_attentions"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"indices": torch.zeros(1, 6, 2)}, "passes indices .* cannot be honoured"),
        ({"block_indices": torch.zeros(1, 1, 6, 2)}, "passes block_indices"),
        ({"sinks": torch.zeros(1, 4, 6, 1)}, "passes sinks"),
        ({"cu_seq_lens_k": torch.tensor([0, 6])}, "cu_seq_lens_k came without cu_seq_lens_q"),
        ({"cu_seq_lens_q": [0, 6]}, "cu_seq_lens_q must be a tensor, got list"),
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, r"cu_seq_lens_q must be offsets up to total = 6"),
        ({"cu_seq_lens_q": torch.tensor([1, 6])}, r"cu_seq_lens_q must be offsets that start at 0"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 6.0])}, "cu_seq_lens_q must be int32 or int64"),
        ({"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}, r"segment ids must be \[1 or 1, 6\]"),
        ({"position_ids": torch.zeros(3, 1, 6, dtype=torch.long)}, "other mRoPE planes"),
        ({"position_ids": torch.zeros(2, 6, dtype=torch.long)}, r"position_ids must be \[1 or 1, 6\]"),
        ({"packing": [3, 3]}, "packing must be a packattn.Packing"),
        ({"packing": packattn.Packing.from_lengths([5])}, "packing must have"),
        ({"attention_mask": torch.zeros(1, 6, 6)}, "attention_mask must be 2-D"),
        ({"attention_mask": torch.zeros(1, 4, 6, 6)}, "per head"),
        ({"attention_mask": torch.full((1, 1, 6, 6), 0.5)}, "a bias on the scores"),
        ({"attention_mask": torch.eye(6).flip(0).bool()[None, None]}, "row 1 of batch element 0"),
        ({"attention_mask": torch.tensor([[[[1, 0, 1, 0, 1, 0]] + [[1] * 6] * 5]]).bool()}, "one run of keys"),
        ({"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.int32)}, "changed its shape on the way"),
        ({"attention_mask": torch.ones(1, 7)}, r"attention_mask must be \[1, 6\]"),
    ],
)
def test_refusals(hf: Any, arguments: dict[str, Any], message: str) -> None:
    q, k, v = heads()
    with pytest.raises((ValueError, TypeError), match=message):
        hf.attention(layer(), q, k, v, **{"attention_mask": None, **arguments})


def test_dropout_of_a_model_in_training(hf: Any) -> None:
    model = FAMILIES["llama"].build(attention_dropout=0.1)
    row = torch.cat(documents(LENGTHS))[None]
    model(row)  # eval: no dropout
    with pytest.raises(ValueError, match="LlamaAttention asks for attention dropout 0.1.*set it to 0"):
        model.train()(row)


def test_offsets_of_other_lengths_and_a_mask(hf: Any) -> None:
    """The mask's diagonal is the row's; by it the first document would see its own future."""
    q, k, v = heads(queries=4, keys=8)
    cu = {"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 4, 8])}
    out, _ = hf.attention(layer(), q, k, v, None, **cu)
    block = torch.block_diag(*[torch.ones(2, 4).tril(2)] * 2).bool()[None]
    torch.testing.assert_close(out, dense(q, k, v, block))
    with pytest.raises(
        ValueError, match="4 queries and 8 keys; they cannot be honoured together with an attention_mask"
    ):
        hf.attention(layer(), q, k, v, torch.ones(1, 8, dtype=torch.int64), **cu)


# ---- masks of the caller ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_dense_document_mask(hf: Any, dtype: torch.dtype) -> None:
    """The 4-D mask of LLaMA-Factory's neat packing: documents, and a padding tail that sees nothing."""
    q, k, v = heads(batch=2, queries=6)
    ids = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 3, 0, 0]])
    mask = ((ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]).tril()
    given = (
        mask if dtype == torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    )
    out, _ = hf.attention(layer(), q, k, v, given[:, None])
    torch.testing.assert_close(out, dense(q, k, v, mask))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_in_the_middle(hf: Any, causal: bool) -> None:
    """Tokens before and after a masked run are one document for sdpa, and here."""
    q, k, v = heads(batch=2, queries=6)
    real = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 0]]).bool()
    out, _ = hf.attention(layer(is_causal=causal), q, k, v, real, position_ids=torch.arange(6)[None])
    see = real[:, None].expand(2, 6, 6)
    want = dense(q, k, v, see.tril() if causal else see)
    torch.testing.assert_close(out[real], want[real])


def test_mask_of_ids_that_reaches_the_function(hf: Any) -> None:
    q, k, v = heads(queries=6)
    ids = torch.tensor([[1, 1, 1, 2, 2, 0]])
    out, _ = hf.attention(layer(), q, k, v, ids)
    mask = ((ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]).tril()
    torch.testing.assert_close(out, dense(q, k, v, mask))


def test_image_blocks_over_a_causal_mask(hf: Any) -> None:
    """or_mask_function and block_sequence_ids of vision-language models: blocks of tokens that see each other."""
    from transformers.masking_utils import create_causal_mask

    config = FAMILIES["llama"].build().config
    embeds = torch.zeros(1, 8, 32)
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1]])
    q, k, v = heads(queries=8)
    want = (torch.ones(8, 8).tril().bool() | ((blocks[0][:, None] == blocks[0]) & (blocks[0] >= 0)))[None]
    for extra in (
        {"block_sequence_ids": blocks},
        {"or_mask_function": lambda b, h, i, j: (blocks[b, i] == blocks[b, j]) & (blocks[b, i] >= 0)},
    ):
        mask = create_causal_mask(config, embeds, None, None, position_ids=torch.arange(8)[None], **extra)
        out, _ = hf.attention(layer(), q, k, v, mask, position_ids=torch.arange(8)[None])
        torch.testing.assert_close(out, dense(q, k, v, want))


# ---- generation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].causal])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_left_padding(hf: Any, name: str, cache: str) -> None:
    torch.manual_seed(0)
    prompt = torch.randint(3, 61, (3, 9))
    mask = torch.ones_like(prompt)
    mask[0, :6], mask[1, :2] = 0, 0
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    if cache == "static":
        arguments |= {"cache_implementation": "static", "disable_compile": True}
    results = []
    for attn in ("packattn", "eager"):
        model = FAMILIES[name].build(attn)
        model.generation_config.eos_token_id = None
        results.append(model.generate(prompt, attention_mask=mask, output_logits=True, **arguments))
    assert torch.equal(results[0].sequences, results[1].sequences)
    for one, two in zip(results[0].logits, results[1].logits, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_prefill_in_two_parts(hf: Any) -> None:
    """q_len > 1 and k_len > q_len: the second part goes on from the cache."""
    for name in ("llama", "mistral", "gpt_oss"):
        model = FAMILIES[name].build()
        row = torch.cat(documents(LENGTHS))[None]
        whole = model(row, use_cache=False).logits
        first = model(row[:, :10], use_cache=True)
        second = model(row[:, 10:], cache=first.cache)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, **TOLERANCE)


def test_packed_positions_on_a_cache_do_not_leak(hf: Any) -> None:
    """The first document goes on from the cache, the second sees itself only."""
    q, k, v = heads(queries=5, keys=8)
    out, _ = hf.attention(layer(), q, k, v, None, position_ids=torch.tensor([[3, 4, 0, 1, 2]]))
    want = torch.ones(5, 8).tril(3).bool()
    want[2:, :5] = False
    torch.testing.assert_close(out, dense(q, k, v, want[None]))


def test_encoder_with_padding(hf: Any) -> None:
    for name in ("bert", "modernbert"):
        row = torch.cat(documents(LENGTHS))[None].repeat(2, 1)
        mask = torch.ones_like(row)
        mask[0, 10:], mask[1, :4] = 0, 0
        one, two = (FAMILIES[name].build(attn)(row, attention_mask=mask).logits for attn in ("packattn", "eager"))
        torch.testing.assert_close(one[mask.bool()], two[mask.bool()], **TOLERANCE)


# ---- once per forward ------------------------------------------------------------------------------------------


@pytest.fixture
def resolved(hf: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every time the ranges are worked out."""
    calls: list[Any] = []
    original = hf._hf_ranges.resolve
    monkeypatch.setattr(hf._hf_ranges, "resolve", lambda *a, **k: calls.append(a) or original(*a, **k))
    return calls


def test_ranges_are_built_once_per_kind_of_layer(resolved: list[Any]) -> None:
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    for name, kinds in (("llama", 1), ("gemma2", 2)):
        model = FAMILIES[name].build(num_hidden_layers=6)
        for _ in range(2):
            resolved.clear()
            model(row, position_ids=pos, use_cache=False)
            assert len(resolved) == kinds, name


def test_boundaries_that_change_in_place_are_seen(hf: Any) -> None:
    """Even where no version counter tells: memory shared with numpy."""
    model = FAMILIES["llama"].build()
    row = torch.cat(documents((5, 4)))[None]
    memory = positions((5, 4))[None].numpy().copy()
    pos = torch.from_numpy(memory)
    with torch.no_grad():
        model(row, position_ids=pos, use_cache=False)
        memory[0] = positions((3, 6)).numpy()
        again = model(row, position_ids=pos, use_cache=False).logits
        fresh = model(row, position_ids=positions((3, 6))[None], use_cache=False).logits
    assert torch.equal(again, fresh)


def test_teacher_in_inference_mode_and_student(hf: Any) -> None:
    """Both get the same position_ids; what was made in inference mode cannot be saved for the student's backward."""
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    teacher, student = FAMILIES["llama"].build(seed=1), FAMILIES["llama"].build()
    with torch.inference_mode():
        target = teacher(row, position_ids=pos, use_cache=False).logits
    (student(row, position_ids=pos, use_cache=False).logits - target.clone()).square().sum().backward()
    assert all(p.grad is not None for p in student.parameters())


def test_threads_do_not_share(hf: Any) -> None:
    model = FAMILIES["llama"].build()
    row = torch.cat(documents(LENGTHS))[None]
    splits = [(5, 4, 1, 7), (9, 8), (17,), (1,) * 17]
    want = [model(row, position_ids=positions(s)[None], use_cache=False).logits.detach() for s in splits]
    wrong: list[tuple[int, ...]] = []

    def work(number: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                got = model(row, position_ids=positions(splits[number])[None], use_cache=False).logits
            if not torch.allclose(got, want[number], atol=1e-5):
                wrong.append(splits[number])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(splits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- with the rest of the stack --------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(hf: Any, reentrant: bool) -> None:
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    gradients = []
    for checkpointing in (False, True):
        model = FAMILIES["gemma2"].build().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(row, position_ids=pos, use_cache=False).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


def test_gradient_checkpointing_when_values_are_no_longer_read(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator values are read in the first forwards only; a layer that is computed again in the backward must
    save as many tensors as before, also where the reading stopped in between."""
    looks = iter([True])
    monkeypatch.setattr(hf, "_may_look", lambda device: next(looks, False))
    row, mask = torch.cat(documents(LENGTHS))[None], torch.ones(1, sum(LENGTHS), dtype=torch.int64)
    mask[:, :3] = 0
    model = FAMILIES["llama"].build().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(row, attention_mask=mask, use_cache=False).logits.square().sum().backward()


def test_autocast(hf: Any) -> None:
    docs = documents(LENGTHS)
    model = FAMILIES["llama"].build()
    with torch.autocast("cpu", torch.bfloat16):
        packed = model(torch.cat(docs)[None], position_ids=positions(LENGTHS)[None], use_cache=False).logits
        packed.float().square().sum().backward()
        alone = torch.cat([model(d[None]).logits[0] for d in docs])
    torch.testing.assert_close(packed[0], alone, rtol=0.05, atol=0.1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_model(hf: Any) -> None:
    docs = documents(LENGTHS)
    model = FAMILIES["gpt_oss"].build().to(torch.bfloat16)
    packed = model(torch.cat(docs)[None], position_ids=positions(LENGTHS)[None], use_cache=False).logits[0]
    alone = torch.cat([model(d[None]).logits[0] for d in docs])
    torch.testing.assert_close(packed, alone, rtol=0.05, atol=0.15)


def test_peft(hf: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    docs = documents(LENGTHS)
    row = torch.cat(docs)[None]
    base = FAMILIES["llama"].build()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
    )
    model(row, position_ids=positions(LENGTHS)[None], use_cache=False).logits.square().sum().backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sum(model(d[None], use_cache=False).logits.square().sum() for d in docs).backward()
    assert packed
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(packed[n], p.grad, rtol=1e-3, atol=1e-3 * float(p.grad.abs().max()))


@pytest.mark.parametrize("wrapper", ["peft", "compile"])
def test_prepare_through_a_wrapper(hf: Any, wrapper: str) -> None:
    """Positions restart too, which BERT's absolute ones show: the wrapper's forward names no position_ids."""
    docs = documents(LENGTHS)
    model: Any = FAMILIES["bert"].build()
    if wrapper == "peft":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query"], init_lora_weights=False))
        model.eval()
    else:
        model = torch.compile(model, backend="eager")
    with torch.no_grad():
        alone = torch.cat([model(d[None]).logits[0] for d in docs])
        hf.prepare(model)
        packed = model(torch.cat(docs)[None], attention_mask=segments(LENGTHS, 1)[None]).logits[0]
    torch.testing.assert_close(packed, alone, **TOLERANCE)


def test_prepare_sees_arguments_without_names(hf: Any) -> None:
    docs = documents(LENGTHS)
    for name in ("llama", "bert"):
        model = FAMILIES[name].build()
        alone = torch.cat([model(d[None]).logits[0] for d in docs])
        hf.prepare(model)
        packed = model(torch.cat(docs)[None], segments(LENGTHS, 1)[None]).logits[0]
        torch.testing.assert_close(packed, alone, **TOLERANCE)


def test_prepare_counts_positions_as_the_model_does(hf: Any) -> None:
    """RoBERTa's positions begin at pad_token_id + 1."""
    docs = documents(LENGTHS)
    model = roberta()
    assert hf.first_position(model) == 2
    alone = torch.cat([model(d[None]).logits[0] for d in docs])
    hf.prepare(model)
    packed = model(torch.cat(docs)[None], attention_mask=segments(LENGTHS, 1)[None]).logits[0]
    torch.testing.assert_close(packed, alone, **TOLERANCE)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(n, marks=SLOW) for n in ("llama", "gemma2", "qwen3", "gpt_oss"))]
)
def test_compiled_in_one_graph(hf: Any, name: str) -> None:
    """No breaks, and no new graph when the documents change."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = FAMILIES[name].build()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    row = torch.cat(documents(LENGTHS))[None]
    with torch.no_grad():
        for lengths in (LENGTHS, (9, 8), (17,), (1,) * 17):
            pos = positions(lengths)[None]
            got = compiled(row, position_ids=pos, use_cache=False).logits
            torch.testing.assert_close(got, model(row, position_ids=pos, use_cache=False).logits, **TOLERANCE)
            cu = offsets(lengths)
            torch._dynamo.mark_dynamic(cu, 0)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "modernbert"])
def test_compiled_with_padding(hf: Any, name: str) -> None:
    torch._dynamo.reset()
    model = FAMILIES[name].build()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    row = torch.cat(documents(LENGTHS))[None].repeat(2, 1)
    mask = torch.ones_like(row)
    mask[0, 10:], mask[1, :4] = 0, 0
    mask[1, 8] = 0
    extra = {"use_cache": False} if FAMILIES[name].causal else {}
    got, want = (m(row, attention_mask=mask, **extra).logits[mask.bool()] for m in (compiled, model))
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.slow
def test_compiled_training_step(hf: Any) -> None:
    torch._dynamo.reset()
    row, pos = torch.cat(documents(LENGTHS))[None], positions(LENGTHS)[None]
    gradients = []
    for compiling in (False, True):
        model = FAMILIES["llama"].build()
        call = torch.compile(model, backend="aot_eager") if compiling else model
        call(row, position_ids=pos, use_cache=False).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


# ---- collators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_data_collator_with_flattening(hf: Any, options: dict[str, Any]) -> None:
    docs = [d for d in documents((3, 1, 6)) if len(d)]
    collator = transformers.DataCollatorWithFlattening(**options)
    batch = collator([{"input_ids": d.tolist()} for d in docs])
    model = FAMILIES["llama"].build()
    out = model(**batch, use_cache=False)
    alone = [model(d[None], labels=d[None]) for d in docs]
    torch.testing.assert_close(out.logits[0], torch.cat([a.logits[0] for a in alone]), **TOLERANCE)
    tokens = [len(d) - 1 for d in docs]
    mean = sum(a.loss * n for a, n in zip(alone, tokens, strict=True) if n) / sum(tokens)
    torch.testing.assert_close(out.loss, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("multiple", [None, 8])
def test_trl_collator(hf: Any, multiple: int | None) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    docs = documents((3, 2, 6))
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    batch = collator([{"input_ids": torch.cat(docs).tolist(), "seq_lengths": [3, 2, 6]}])
    assert "attention_mask" not in batch
    model = FAMILIES["mistral"].build()
    logits = model(**batch, use_cache=False).logits[0, :11]
    torch.testing.assert_close(logits, torch.cat([model(d[None]).logits[0] for d in docs]), **TOLERANCE)


def test_axolotl_batch(hf: Any) -> None:
    """position_ids that restart, ids 1..n in the mask, and a pad document counted on its own."""
    docs = documents((3, 2, 6))
    row = torch.cat([*docs, torch.zeros(5, dtype=torch.long)])[None]
    model = FAMILIES["qwen3"].build()
    logits = model(
        row,
        position_ids=torch.cat([positions((3, 2, 6)), torch.arange(5)])[None],
        attention_mask=torch.cat([segments((3, 2, 6), 1), torch.zeros(5, dtype=torch.int32)])[None].long(),
        use_cache=False,
    ).logits[0, :11]
    torch.testing.assert_close(logits, torch.cat([model(d[None]).logits[0] for d in docs]), **TOLERANCE)
