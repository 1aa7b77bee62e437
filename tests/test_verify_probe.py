"""packattn.verify.probe: a small Llama-style model, packed rightly and in the ways people get it wrong."""

import functools
import json
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packattn
from packattn.verify import LeakError, probe

VOCABULARY, WIDTH, HEADS, HEADS_K, HEAD_DIM = 31, 32, 4, 2, 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rotate(x, positions):
    """RoPE of x [T, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


def causal(q, k, v, packing):
    """What a model does that does not know of documents."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, HEADS_K * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, HEADS_K * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, positions, packing, attention):
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        y = attention(rotate(q, positions), rotate(k, positions), v, packing)
        x = x + self.dropout(self.o(y.flatten(1)))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Llama(nn.Module):
    def __init__(self, attention=packattn.attention, learned_positions=0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.learned = nn.Embedding(learned_positions, WIDTH) if learned_positions else None
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attention = attention

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids, packing):
        x, positions = self.embedding(input_ids)[0], position_ids[0]
        if self.learned is not None:
            x = x + self.learned(positions)
        for layer in self.layers:
            x = layer(x, positions, packing, self.attention)
        return types.SimpleNamespace(logits=self.head(self.norm(x))[None])


def running(model, input_ids, packing):
    return model(input_ids, torch.arange(input_ids.shape[1])[None], packing)


def make(attention=packattn.attention, **options):
    torch.manual_seed(0)
    return Llama(attention, **options)


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (5, 4, 1, 7)]


def test_packattn_passes(documents):
    report = probe(make(), documents)
    report.raise_if_failed()
    assert report.leak == 0 and report.gradient_leak == 0 and not report.leaks and not report.failures()
    assert report.deterministic and report.backward == "checked"
    assert 0 <= report.max_relative_error < 1e-5
    assert (report.influence.diagonal() > 0).all() and (report.gradient.diagonal() > 0).all()
    assert int((report.changed != 0).sum()) == len(documents)
    text = str(report)
    assert "probe: passed" in text and "leak: 0 (must be 0), in 0 of 12 pairs" in text


def test_plain_causal_with_running_positions_leaks_forwards(documents):
    report = probe(make(causal), documents, run=running)
    assert not report.passed and report.leak > 0.01 and report.gradient_leak > 0
    # A document sees all those before it, and none after.
    assert torch.equal(report.influence != 0, torch.ones(4, 4).triu().bool())
    assert torch.equal(report.gradient != 0, torch.ones(4, 4).triu().bool())
    assert report.max_relative_error > report.tolerance and report.error[0] < 1e-5
    with pytest.raises(
        LeakError, match=r"document \d, token \d \(row \d+\) sees document \d, token \d \(row \d+\): 0\.\d"
    ):
        report.raise_if_failed()
    text = str(report)
    assert "in 6 of 12 pairs" in text and "is not what it is alone" in text


def test_reset_positions_alone_still_leak(documents):
    report = probe(make(causal), documents)
    assert not report.passed and report.leak > 0.01
    assert torch.equal(report.influence != 0, torch.ones(4, 4).triu().bool())


def test_the_token_that_is_seen_is_found(documents):
    """A model in which the last token of document 0 reaches the first of document 1, and nothing else leaks."""

    def one_key(q, k, v, packing):
        mask = packattn.dense_mask(packing)
        if packing.total > 9:
            mask[5, 4] = True
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    model = make(one_key)
    model.layers = model.layers[:1]
    report = probe(model, documents)
    assert [(leak.source, leak.document, leak.row, leak.key_row) for leak in report.leaks] == [(0, 1, 5, 4)]
    leak = report.leaks[0]
    assert leak.size == leak.key_size == report.leak > 0 and leak.changed == VOCABULARY
    assert leak.text.startswith("document 1, token 0 (row 5) sees document 0, token 4 (row 4): ")
    assert probe(model, documents, locate=0).leaks[0].key_row is None


def test_wrong_positions_show_in_the_logits_and_not_as_a_leak(documents):
    """Learned positions that run on: attention is right, and the documents are still not what they are alone."""
    report = probe(make(learned_positions=32), documents, run=running)
    assert not report.passed and report.leak == 0 and report.gradient_leak == 0 and not report.leaks
    assert [line.split(" is not")[0] for line in report.failures()] == ["document 1", "document 2", "document 3"]
    probe(make(learned_positions=32), documents).raise_if_failed()


class LeakyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packing):
        ctx.packing = packing
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[ctx.packing.ends[0] - 1] += 1e-6 * grad[ctx.packing.starts[-1]]
        return grad, None


def test_a_leak_in_the_backward_only(documents):
    def attention(q, k, v, packing):
        v = LeakyBackward.apply(v, packing) if packing.num_documents > 1 else v
        return packattn.attention(q, k, v, packing)

    report = probe(make(attention), documents)
    assert not report.passed and report.leak == 0 and report.gradient_leak > 0
    assert [(leak.source, leak.document) for leak in report.leaks] == [(0, 3)]
    assert "document 3 sees document 0, token 4 (row 4): " in str(report) and "in the backward only" in str(report)
    assert probe(make(attention), documents, backward=False).passed


def test_mode_gradients_and_random_state_are_left_alone(documents):
    model = make()
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    probe(model, documents).raise_if_failed()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.embedding._forward_hooks
    with pytest.raises(ZeroDivisionError):
        probe(model, documents, run=lambda *_: 1 / 0)
    assert [module.training for module in model.modules()] == modes


def test_a_frozen_model_is_checked_in_the_backward_too(documents):
    report = probe(make().requires_grad_(False), documents)
    assert report.passed and report.backward == "checked"


def test_dropout_is_called_noise_and_not_a_leak(documents):
    model = make(lambda q, k, v, p: F.dropout(packattn.attention(q, k, v, p), 0.1, training=True))
    report = probe(model, documents)
    assert not report.passed and not report.deterministic and not report.leaks
    assert report.leak != report.leak and report.gradient is None and report.to_dict()["leak"] is None
    assert "the model is not deterministic" in str(report) and "sees" not in str(report)


def test_rare_noise_is_not_called_a_leak(documents):
    calls = 0

    def attention(q, k, v, packing):
        nonlocal calls
        calls += packing.num_documents > 1
        return packattn.attention(q, k, v, packing) * (1 + 1e-3 * (calls > 4 and calls % 3 == 0))

    report = probe(make(attention), documents)
    assert not report.deterministic and not report.leaks and not report.passed


def test_without_an_embedding_the_backward_is_said_to_be_unchecked(documents):
    model = make().eval()  # hidden in a function, it cannot be put there by the probe
    plain = lambda tokens, position_ids, packing: model(tokens, position_ids, packing).logits[0]  # [T, V]
    report = probe(plain, documents)
    assert report.passed and report.gradient is None and report.gradient_leak is None
    assert report.backward.startswith("not checked, no input embedding found") and report.backward in str(report)
    strict = probe(plain, documents, backward=True)
    assert not strict.passed and "the backward was to be checked" in str(strict)
    assert probe(plain, documents, embedding=model.embedding, backward=True).passed
    skipped = probe(model, documents, backward=False)
    assert skipped.passed and skipped.backward == "not checked (backward=False)"
    # An embedding that the run does not use, and a model whose logits are cut off from it.
    assert "it was not called" in probe(plain, documents, embedding=nn.Embedding(2, 2)).backward
    cut = lambda *arguments: model(*arguments).logits.detach()
    report = probe(model, documents, run=lambda m, ids, p: cut(ids, p.position_ids[None], p))
    assert report.backward == "not checked, the logits have no gradient to the embedding"


def test_what_run_may_return(documents):
    model = make()
    for wrap in (lambda x: x, lambda x: x[0], lambda x: (x, None), lambda x: {"logits": x}):
        run = lambda m, ids, p, wrap=wrap: wrap(m(ids, p.position_ids[None], p).logits)
        assert probe(model, documents, run=run, backward=False).passed
    with pytest.raises(ValueError, match=r"run must return floating-point logits \[1, 17, V\] or \[17, V\]"):
        probe(model, documents, run=lambda m, ids, p: torch.zeros(1, 3, 5))
    with pytest.raises(TypeError, match="logits or an object with .logits, got NoneType"):
        probe(model, documents, run=lambda m, ids, p: None)


def test_a_model_that_answers_nothing_does_not_pass(documents):
    report = probe(lambda ids, position_ids, packing: torch.zeros(1, ids.shape[1], 5), documents)
    assert not report.passed and report.leak == 0
    assert "replacing document 0 does not change its own logits" in str(report)
    bad = probe(lambda ids, position_ids, packing: torch.full((1, ids.shape[1], 5), float("nan")), documents)
    assert not bad.passed and "the logits hold NaN" in str(bad)


def test_gradients_that_take_another_path_are_compared(documents):
    def attention(q, k, v, packing):
        out = packattn.attention(q, k, v, packing)
        return out * 1.1 if torch.is_grad_enabled() else out

    report = probe(make(attention), documents)
    assert not report.passed and "with gradients enabled the model gives other logits" in str(report)


def test_empty_documents_and_padding_of_the_matrix(documents):
    empty = torch.zeros(0, dtype=torch.long)
    report = probe(make(), [empty, documents[0], empty, documents[1]])
    report.raise_if_failed()
    assert report.influence.shape == (4, 4) and report.influence[0].sum() == report.influence[:, 2].sum() == 0


def test_documents_that_can_show_nothing_are_refused(documents):
    model = make()
    empty = torch.zeros(0, dtype=torch.long)
    for few in ([], documents[:1], [documents[0], empty]):
        with pytest.raises(ValueError, match="at least two documents with tokens, got"):
            probe(model, few)
    with pytest.raises(ValueError, match=r"documents\[1\] must be 1-D \[length\], got shape \[1, 4\]"):
        probe(model, [documents[0], documents[1][None]])
    with pytest.raises(TypeError, match=r"documents\[0\] must be int64 or int32, got float32"):
        probe(model, [documents[0].float(), documents[1]])
    with pytest.raises(TypeError, match=r"documents\[0\] must be a tensor of token ids, got list"):
        probe(model, [[1, 2], documents[1]])
    with pytest.raises(ValueError, match="one token id only"):
        probe(model, [torch.ones(3, dtype=torch.long), torch.ones(2, dtype=torch.long)])
    with pytest.raises(ValueError, match="replacement returned document 0 unchanged"):
        probe(model, documents, replacement=lambda document, number: document)
    with pytest.raises(ValueError, match=r"replacement must return int64 \[5\] for document 0, got int64 \[4\]"):
        probe(model, documents, replacement=lambda document, number: document[1:])


def test_replacement_seed_and_progress(documents):
    model = make(causal)
    seen = []
    a = probe(model, documents, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 14) for i in range(14)]
    b, c = probe(model, documents), probe(model, documents, seed=5)
    assert torch.equal(a.influence, b.influence) and not torch.equal(a.influence, c.influence)
    ones = probe(model, documents, replacement=lambda document, number: (document + 1 + number) % VOCABULARY)
    assert ones.leak > 0


def test_report_as_json(documents):
    report = probe(make(causal), documents)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["passed"] is False and data["leak"] == report.leak and len(data["influence"]) == 4
    assert data["leaks"][0]["text"] == report.leaks[0].text and data["failures"]


def test_many_documents_show_the_worst():
    documents = [torch.tensor([n % 7, n % 5, n % 3]) for n in range(1, 31)]
    text = str(probe(make(causal), documents, backward=False))
    assert "(the 16 worst of 30 documents)" in text and "more" in text
    assert len(text.splitlines()) < 50


def test_a_compiled_model(documents):
    model = make()
    model.layers = model.layers[:1]
    report = probe(torch.compile(model, backend="eager", dynamic=True), documents[:2])
    report.raise_if_failed()
    assert report.backward == "checked"


def test_lower_precision(documents):
    report = probe(make().bfloat16(), documents)
    report.raise_if_failed()
    assert report.dtype == torch.bfloat16 and report.leak == 0
    leaking = probe(make(functools.partial(causal)).bfloat16(), documents)
    assert leaking.leak > 0 and leaking.leaks
