"""torchtitan, OLMo-core, Megatron: their hooks' contract, with stand-ins (none of them installs without a GPU stack)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import packattn
from packattn.integrations import megatron, olmo, torchtitan
from packattn.verify.expected import Formula, expected_mask

LENGTHS = (3, 4, 2)
SPANS = [(0, 3), (3, 7), (7, 9)]


def offsets(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(*lead: int, hq: int = 4, hk: int = 2) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, h, 8, generator=g) for h in (hq, hk, hk)]


def want(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Any = SPANS, **pattern: Any) -> torch.Tensor:
    sinks = pattern.pop("sinks", None)
    mask = expected_mask(spans, spans, q.shape[0], k.shape[0], **pattern)
    return Formula(mask, 8**-0.5, sinks=sinks)(q, k, v)[0]


class TestTorchtitan:
    def test_positions_and_metadata_agree(self) -> None:
        q, k, v = qkv(9)
        module = torchtitan.PackattnAttention.Config().build()
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        metadata = SimpleNamespace(cu_seq_q=offsets(), cu_seq_k=offsets(), max_q=4, max_k=4)
        for masks in (torchtitan.get_attention_masks(positions), metadata):
            torch.testing.assert_close(module(q, k, v, attention_masks=masks), want(q, k, v))

    def test_window_batch_and_transform(self) -> None:
        q, k, v = qkv(3, 3)
        module = torchtitan.PackattnAttention.Config(window_size=(1, 0)).build()
        masks = packattn.Packing.from_lengths([3, 3, 3])
        flat = want(*(x.flatten(0, 1) for x in (q, k, v)), spans=[(0, 3), (3, 6), (6, 9)], window_size=(1, 0))
        torch.testing.assert_close(module(q, k, v, attention_masks=masks).flatten(0, 1), flat)
        seen = []
        module(
            q, k, v, attention_masks=masks, out_transform=lambda out, lse: seen.append((out.shape, lse.shape)) or out
        )
        assert seen == [((9, 4, 8), (4, 9))]

    def test_other_masks_are_refused(self) -> None:
        with pytest.raises(TypeError, match="cu_seq_q and cu_seq_k, got Tensor"):
            torchtitan.PackattnAttention()(*qkv(9), attention_masks=torch.ones(9, 9))
        with pytest.raises(TypeError, match="unexpected keyword"):
            torchtitan.PackattnAttention()(*qkv(9), attention_masks=None, score_mod=None)


class StandInBackend(torch.nn.Module):
    """The constructor of OLMo-core's AttentionBackend."""

    def __init__(
        self,
        *,
        head_dim: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        cache: Any = None,
    ) -> None:
        type(self).assert_supported()
        super().__init__()
        self.head_dim, self.n_heads, self.n_kv_heads = head_dim, n_heads, n_kv_heads or n_heads
        self.scale, self.dropout_p, self.window_size, self.cache = scale, dropout_p, window_size, cache
        self.cp_enabled = False

    @classmethod
    def assert_supported(cls) -> None: ...


class TestOlmo:
    @pytest.fixture
    def model(self) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.backend = StandInBackend(head_dim=8, n_heads=4, n_kv_heads=2, window_size=(2, 0))
        full = torch.nn.Module()
        full.backend = StandInBackend(head_dim=8, n_heads=4, n_kv_heads=2)
        return torch.nn.Sequential(layer, full)

    def test_documents(self, model: torch.nn.Module) -> None:
        assert olmo.use_packattn(model, StandInBackend) == 2
        q, k, v = qkv(1, 9)
        for layer, pattern in zip(model, ({"window_size": (2, 0)}, {}), strict=True):
            out = layer.backend((q, k, v), cu_doc_lens=offsets(), max_doc_len=4)
            assert out.shape == q.shape
            torch.testing.assert_close(out[0], want(q[0], k[0], v[0], **pattern))

    def test_batch_without_documents_and_packed_qkv(self, model: torch.nn.Module) -> None:
        olmo.use_packattn(model, StandInBackend)
        q, k, v = qkv(3, 3, hk=4)
        out = model[1].backend(torch.stack([q, k, v], 2))
        flat = want(*(x.flatten(0, 1) for x in (q, k, v)), spans=[(0, 3), (3, 6), (6, 9)])
        torch.testing.assert_close(out.flatten(0, 1), flat)

    @pytest.mark.parametrize("name", ["local_k_slice", "kv_cache_manager", "or_mask", "and_mask"])
    def test_refusals(self, model: torch.nn.Module, name: str) -> None:
        olmo.use_packattn(model, StandInBackend)
        with pytest.raises(ValueError, match=f"{name} cannot be honoured"):
            model[0].backend(tuple(qkv(1, 9)), **{name: slice(0, 2)})

    def test_nothing_to_replace(self) -> None:
        with pytest.raises(ValueError, match="Linear holds no module of type StandInBackend"):
            olmo.use_packattn(torch.nn.Linear(2, 2), StandInBackend)


class TestMegatron:
    @staticmethod
    def build(mask_type: str = "padding_causal", layer: int = 1, **config: Any) -> megatron.PackattnCoreAttention:
        config = {"num_attention_heads": 4, "attention_dropout": 0.0, "params_dtype": torch.float32, **config}
        return megatron.PackattnCoreAttention(SimpleNamespace(**config), layer, SimpleNamespace(name=mask_type), "self")

    @staticmethod
    def params(**changes: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{"qkv_format": "thd", "cu_seqlens_q": offsets(), "cu_seqlens_kv": offsets(), **changes}
        )

    def test_thd(self) -> None:
        q, k, v = qkv(9)
        out = self.build()(q, k, v, None, packed_seq_params=self.params())
        torch.testing.assert_close(out, want(q, k, v).flatten(1))

    def test_padded_offsets(self) -> None:
        """Documents of 3, 4 and 2 tokens at multiples of 4: the tokens between belong to none."""
        q, k, v = qkv(12)
        padded = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
        module = self.build()
        out = module(
            q, k, v, None, packed_seq_params=self.params(cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
        )
        torch.testing.assert_close(out, want(q, k, v, spans=[(0, 3), (4, 8), (8, 10)]).flatten(1))
        assert (out[[3, 10, 11]] == 0).all()

    def test_offsets_that_repeat_their_end(self) -> None:
        q, k, v = qkv(9)
        cu = torch.tensor([0, 3, 7, 9, 9, 9], dtype=torch.int32)
        out = self.build()(q, k, v, None, packed_seq_params=self.params(cu_seqlens_q=cu, cu_seqlens_kv=cu))
        torch.testing.assert_close(out, want(q, k, v).flatten(1))

    def test_batch_first_of_sequences(self) -> None:
        q, k, v = qkv(3, 2)
        out = self.build("causal")(q, k, v, None)
        flat = want(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)), spans=[(0, 3), (3, 6)])
        torch.testing.assert_close(out, flat.reshape(2, 3, 32).transpose(0, 1))

    @pytest.mark.parametrize("window", [None, (1, 0)])
    def test_documents_in_the_mask(self, window: Any) -> None:
        """reset_attention_mask: Megatron hides other documents in attention_mask, of the type "causal" all the same."""
        q, k, v = qkv(7, 2)
        hidden = torch.ones(2, 1, 7, 7).triu(1).bool()
        hidden[0, :, 3:, :3] = True
        hidden[1, :, 5:, :5] = True
        out = self.build("causal", window_size=window)(q, k, v, hidden)
        spans = [(0, 3), (3, 7), (7, 12), (12, 14)]
        pattern = {} if window is None else {"window_size": window}
        flat = want(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)), spans=spans, **pattern)
        torch.testing.assert_close(out, flat.reshape(2, 7, 32).transpose(0, 1))

    def test_causal_mask_for_every_row_of_the_batch(self) -> None:
        q, k, v = qkv(5, 2)
        module = self.build("causal")
        out = module(q, k, v, torch.ones(1, 1, 5, 5).triu(1).bool())
        torch.testing.assert_close(out, module(q, k, v, None))

    def test_window_skip_and_sinks(self) -> None:
        q, k, v = qkv(9)
        module = self.build(layer=1, window_size=(1, 0), window_attn_skip_freq=2, softmax_type="learnable")
        torch.nn.init.normal_(module.softmax_offset)
        out = module(q, k, v, None, packed_seq_params=self.params())
        torch.testing.assert_close(out, want(q, k, v, window_size=(1, 0), sinks=module.softmax_offset).flatten(1))
        out.sum().backward()
        assert module.softmax_offset.grad is not None
        module = self.build(layer=2, window_size=(1, 0), window_attn_skip_freq=2, softmax_type="off-by-one")
        out = module(q, k, v, None, packed_seq_params=self.params())
        torch.testing.assert_close(out, want(q, k, v, sinks=torch.zeros(4)).flatten(1))

    def test_bidirectional(self) -> None:
        q, k, v = qkv(9)
        out = self.build("padding")(q, k, v, None, packed_seq_params=self.params())
        torch.testing.assert_close(out, want(q, k, v, causal=False).flatten(1))

    @pytest.mark.parametrize(
        ("build", "call", "message"),
        [
            ({"context_parallel_size": 2}, {}, "context_parallel_size must be 1"),
            ({"softmax_type": "x"}, {}, "softmax_type must be"),
            ({"attention_dropout": 0.1}, {}, "attention_dropout 0.1 cannot be honoured"),
            ({"mask_type": "arbitrary"}, {}, "attn_mask_type must be"),
            ({}, {"attention_bias": torch.ones(1)}, "attention_bias cannot be honoured"),
            ({}, {"packed_seq_params": SimpleNamespace(qkv_format="sbhd")}, 'qkv_format must be "thd"'),
            ({}, {"packed_seq_params": SimpleNamespace(cu_seqlens_q=None)}, "must have cu_seqlens_q, got None"),
        ],
    )
    def test_refusals(self, build: dict[str, Any], call: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.build(**build)(*qkv(9), None, **{"packed_seq_params": self.params(), **call})

    def test_dense_masks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="attention_mask .* cannot be honoured"):
            self.build("padding")(*qkv(3, 2), torch.ones(2, 1, 3, 3).bool())
        causal = torch.ones(2, 1, 3, 3).triu(1).bool()
        for mask, message in (
            (causal.float(), "attention_mask must be bool"),
            (causal[..., :2], r"attention_mask must be bool \[2 or 1, 1, 3, 3\]"),
            (causal | torch.tensor([True, False, False]), "hides keys from every token"),
            (causal | torch.tensor([[0], [0], [1]]) * torch.tensor([0, 1, 0]) == 1, "one run of keys.*row 2"),
        ):
            with pytest.raises(ValueError, match=message):
                self.build("causal")(*qkv(3, 2), mask)
