"""How does this model pack? Every way of calling it, for several attention implementations, with what mends each failure.

MODEL is a folder that transformers can load, a GGUF file, or a name that transformers finds. The exit status is 0 if
every way that ran keeps the documents apart and gives the logits of the documents alone, 1 if not, 2 if the model could
not be loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from packattn.cli import pictures
from packattn.cli.progress import Progress

EXAMPLES = """\
packattn check --random llama                      a small random model, all implementations
packattn check ./model --attn sdpa,packattn        a folder
packattn check model.gguf --picture check.png      a GGUF file, and a picture of which query sees which key
"""
SUMMARY = "how a transformers model packs: leaks, positions, packed against unpacked"

# Sizes of a small random model, for every name that a family's config may use.
_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "hidden_dim": 96,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "moe_intermediate_size": 32,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file, or a name that transformers finds")
    parser.add_argument(
        "--random", metavar="ARCH", help="a small random model of this type instead (llama, gemma2, bert)"
    )
    parser.add_argument(
        "--attn",
        metavar="NAMES",
        type=_names,
        help="attention implementations, by commas (default: eager,sdpa,flex_attention,packattn)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--tolerance", type=float, help="of packed against alone, relative to the largest logit")
    parser.add_argument("--seed", type=int, default=0, help="of the random model and the documents")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--picture",
        type=pictures.output_file,
        metavar="FILE",
        help="draw the verdict of every way, and which query sees which key, into FILE (png, svg, pdf); takes a forward "
        "per token and implementation",
    )


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.random is None):
        print("packattn check: give a MODEL or --random ARCH, and only one of them", file=sys.stderr)
        return 2
    try:
        if args.picture:  # before minutes of work, not after them
            pictures.check(args.picture)
        model = random_model(args.random, args.seed) if args.random else load(args.model)
        model = model.to(device=args.device, dtype=getattr(torch, args.dtype))
    except Exception as error:  # noqa: BLE001  (transformers raises many kinds for a model that it cannot load)
        print(f"packattn check: {error}", file=sys.stderr)
        return 2
    from packattn.verify.model import IMPLEMENTATIONS, check_model
    from packattn.verify.ways import WAYS

    names = args.attn or IMPLEMENTATIONS
    bar = None if args.json else Progress(len(names) * len(WAYS), "calls")

    def advance(done: int, total: int) -> None:
        while bar is not None and bar.done < done:
            bar.advance()

    try:
        report = check_model(
            model,
            implementations=names,
            tolerance=args.tolerance,
            seed=args.seed,
            keys=args.picture is not None,
            progress=advance,
        )
    except (ValueError, TypeError) as error:  # a model that takes no rows of tokens
        print(f"packattn check: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if args.json else f"\n{report}")
    if args.picture:
        from packattn import plotting

        pictures.save(plotting.plot_check(report), args.picture, quiet=args.json)
    return 0 if report.passed else 1


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"wanted names of attention implementations, by commas, got {text!r}")
    return names


def load(name: str) -> Any:
    """The model, as its config says (a causal or masked language model, or the bare encoder).

    Raises:
        FileNotFoundError: a path that does not exist. Others as transformers raises them.
    """
    import transformers

    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{name} does not exist")
        return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
    if ("/" not in name or name.startswith((".", "/"))) and not path.exists():
        raise FileNotFoundError(f"{name} does not exist")
    config = transformers.AutoConfig.from_pretrained(name)
    kind = next((getattr(transformers, a, None) for a in config.architectures or ()), None) or transformers.AutoModel
    return kind.from_pretrained(name)


def random_model(architecture: str, seed: int) -> Any:
    """A small random model of a type that transformers knows ("llama", "mistral", "gemma2", "bert", ...).

    Raises:
        ValueError: an unknown type.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING:
        raise ValueError(
            f"--random: ARCH must be a model type of transformers (llama, gemma2, bert, ...), got {architecture!r}"
        )
    kind = CONFIG_MAPPING[architecture]
    known = kind().to_dict()
    names = {v: k for k, v in (getattr(kind, "attribute_map", None) or {}).items()}
    small = {k: v for k, v in _SMALL.items() if k in known and (known[k] is not None or k.endswith("_id"))}
    small = {k: v for k, v in small.items() if k not in names or names[k] not in small}
    for name in known:
        if name.endswith(("dropout", "dropout_prob", "_pdrop")):
            small[name] = 0.0
    torch.manual_seed(seed)
    try:
        config = kind(**small)
    except Exception as error:
        raise ValueError(f"--random: no small {architecture} can be made: {error}") from error
    # Encoders have a causal head too, so the masked one comes first.
    heads = (
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_MAPPING, transformers.AutoModel),
    )
    for mapping, auto in heads:
        if kind in mapping:
            try:
                return auto.from_config(config, attn_implementation="eager")
            except Exception as error:
                raise ValueError(f"--random: no small {architecture} can be made: {error}") from error
    raise ValueError(f"--random: transformers has no model of tokens for the type {architecture!r}")
