"""Embeddings of sentences of mixed length: packed rows against padded batches.

    python benchmarks/encoders.py MODEL [--sentences 1000] [--batch 32] [--threads N]

MODEL is a folder with a transformers encoder (all-MiniLM-L6-v2). Every contender is checked against one sentence at a time
before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

import packattn.integrations.transformers as hf
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf.register()
    packed_model = transformers.AutoModel.from_pretrained(args.model, attn_implementation="packattn").eval()
    model = transformers.AutoModel.from_pretrained(args.model, attn_implementation="sdpa").eval()
    random = np.random.RandomState(0)
    lengths = np.clip(np.exp(random.normal(2.8, 0.8, args.sentences)).astype(int), 2, 200)
    documents = [[101, *random.randint(1000, model.config.vocab_size, n).tolist(), 102] for n in lengths]
    contenders: dict[str, Callable[[], torch.Tensor]] = {
        "padded, in their order": lambda: padded(model, documents, args.batch, False),
        "padded, sorted by length": lambda: padded(model, documents, args.batch, True),
        "packed (packattn)": lambda: embed(packed_model, documents, capacity=args.capacity),
    }
    sample = range(0, len(documents), max(1, len(documents) // 50))
    alone = torch.cat([padded(model, [documents[i]], 1, False) for i in sample])
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in contenders.items():
        cosine = torch.nn.functional.cosine_similarity(run()[list(sample)], alone)
        assert float(cosine.min()) > 0.99999, f"{name}: cosine {float(cosine.min())}"
    for _ in range(args.repeats):  # in turn, so that a change of the machine's load meets all of them
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    first = statistics.median(times["padded, in their order"])
    print(f"{args.sentences} sentences, {sum(map(len, documents))} tokens, batch {args.batch}, {args.threads} threads")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"  {name:26} {middle:7.2f} s  {first / middle:5.2f}x")


if __name__ == "__main__":
    main()
