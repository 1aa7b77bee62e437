#!/usr/bin/env python
"""A few small calls of every kernel, forward and backward, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck --kernel-regex kns=packattn --error-exitcode 9 python benchmarks/device/small.py
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor

import packattn

# head dim, head dim of v, heads, options
CALLS = [
    (64, 64, (4, 2), {}),
    (128, 128, (4, 1), {"window_size": (40, 0)}),
    (192, 128, (2, 2), {"causal": False}),
    (256, 256, (2, 1), {"softcap": 20.0}),
    (80, 72, (2, 1), {"chunk_size": 24}),
]
LENGTHS = (1, 70, 0, 33, 129, 5)
TENSOR_CORES = ("sm80", "sm90")  # families that serve numbers of 16 bits alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--family", choices=("auto", "plain", *TENSOR_CORES), default="auto", help="of the CUDA kernels"
    )
    options = parser.parse_args()
    device = options.device
    os.environ["PACKATTN_CUDA_KERNEL"] = options.family
    dtypes = [torch.bfloat16, torch.float16] + ([] if options.family in TENSOR_CORES else [torch.float32])
    packing = packattn.Packing.from_lengths(LENGTHS, total=sum(LENGTHS) + 3, device=device)
    again = packattn.Packing.from_position_ids(packing.position_ids, max_segments=16)
    from_ids = packattn.Packing.from_segment_ids(packing.segment_ids, pad_id=-1, max_segments=16)
    assert torch.equal(again.position_ids[: sum(LENGTHS)], packing.position_ids[: sum(LENGTHS)])
    assert all(torch.equal(a, b) for a, b in zip(from_ids.key_ranges(), packing.key_ranges(), strict=True))
    bad = 0
    for dtype in dtypes:
        for d, dv, (hq, hkv), options in CALLS:

            def draw(heads: int, dim: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(packing.total, heads, dim, device=device).to(dtype).requires_grad_()

            q, k, v = draw(hq, d), draw(hkv, d), draw(hkv, dv)
            sinks = torch.randn(hq, device=device).requires_grad_()
            out, lse = packattn.attention(q, k, v, packing, sinks=sinks, return_lse=True, **options)
            seen = ~packing.is_padding
            (out.float().sum() + lse[:, seen].sum()).backward()
            results = [out, *(x.grad for x in (q, k, v, sinks))]
            bad += not all(bool(t.isfinite().all()) for t in results if t is not None)
    print(f"{len(dtypes) * len(CALLS)} calls, {bad} with results that are not finite")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
