"""One tiny random model of every family whose attention differs, and how it is run packed and alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that a wrong mask shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def register() -> None:
    from packattn.integrations import transformers as hf

    hf.register()


@dataclass(frozen=True)
class Family:
    config: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    positions: bool = True  # takes position_ids
    causal: bool = True
    uses: Callable[[Any], bool] | None = None  # whether the config really has what the family stands for

    def build(self, attn: str = "packattn", seed: int = 0, **changes: Any) -> Any:
        import transformers

        if attn == "packattn":
            register()
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**COMMON, **self.changes, **changes})
        assert self.uses is None or self.uses(config), f"{self.config} no longer has what this test is about"
        config._attn_implementation = attn
        model = getattr(transformers, self.model)(config).eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
        return model


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "mistral": Family(
        "MistralConfig", "MistralForCausalLM", {"sliding_window": 4}, uses=lambda c: c.sliding_window == 4
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 4, "head_dim": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        uses=lambda c: "sliding_attention" in c.layer_types and c.attn_logit_softcapping == 5.0,
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        # One expert: with several, how the router groups the tokens of one document moves the rounding of another's.
        {"sliding_window": 4, "head_dim": 8, "num_local_experts": 1, "num_experts_per_tok": 1},
        uses=lambda c: "sliding_attention" in c.layer_types,
    ),
    "llama4": Family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 4,
            "head_dim": 8,
            "num_local_experts": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        uses=lambda c: c.attention_chunk_size == 4,
    ),
    "modernbert": Family(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        causal=False,
        uses=lambda c: "sliding_attention" in c.layer_types,
    ),
    "bert": Family(
        "BertConfig",
        "BertForMaskedLM",
        {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
        causal=False,
    ),
}


def roberta(head: str = "RobertaForMaskedLM", attn: str = "packattn") -> Any:
    """Its positions begin at pad_token_id + 1, here 2."""
    import transformers

    if attn == "packattn":
        register()
    torch.manual_seed(0)
    changes = {"pad_token_id": 1, "bos_token_id": 0, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config = transformers.RobertaConfig(**{**COMMON, **changes})
    config._attn_implementation = attn
    return getattr(transformers, head)(config).eval()


def documents(lengths: tuple[int, ...], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, COMMON["vocab_size"], (n,), generator=generator) for n in lengths]


def positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def segments(lengths: tuple[int, ...], first: int = 0) -> torch.Tensor:
    return torch.cat([torch.full((n,), first + i, dtype=torch.int32) for i, n in enumerate(lengths)])
