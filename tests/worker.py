"""Work that has to run in a process of its own (another environment, its peak memory): `python tests/worker.py NAME`.

Prints one JSON value on the last line of stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def in_subprocess(name: str, *args: str, timeout: float = 600, **environment: str) -> Any:
    """The result of the function `name` of this file in a new interpreter. A failure there is a RuntimeError here."""
    done = subprocess.run(
        [sys.executable, str(HERE / "worker.py"), name, *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"worker.py {name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def digests() -> dict[str, str]:
    """A hash of the bits of every result of SUBSET."""
    from cases import BFLOAT16, FLOAT32, SUBSET
    from helpers import bits, inputs, run

    result = {}
    for case in SUBSET:
        for dtype in (FLOAT32, BFLOAT16):
            for name, t in run(case, inputs(case, dtype)).items():
                result[f"{case.name} {dtype} {name}"] = hashlib.sha256(bits(t).numpy().tobytes()).hexdigest()[:16]
    return result


def check() -> dict[str, Any]:
    """The error law over SUBSET, and packed against alone, in this environment."""
    import warnings

    from cases import BFLOAT16, FLOAT32, SUBSET
    from helpers import Oracle, assert_same_bits, inputs, inputs_of_document, of_document, run

    from packattn import _library

    failures, count = [], 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in SUBSET:
            for dtype in (FLOAT32, BFLOAT16):
                count += 1
                x = inputs(case, dtype)
                try:
                    got = run(case, x)
                    Oracle(case, x).check(got)
                    for n in (0, len(case.documents) - 1):
                        alone = run(case.alone(n), inputs_of_document(case, n, x))
                        alone.pop("dsinks", None)
                        if _library.CPU.loaded:
                            assert_same_bits(of_document(case, n, got), alone, f"{case.name}: document {n} alone")
                except (AssertionError, RuntimeError) as error:
                    failures.append(f"{case.name} {dtype}: {error}")
    return {
        "isa": None if _library.extension is None else _library.extension.cpu_isa(),
        "loaded": _library.CPU.loaded,
        "cases": count,
        "failures": failures,
        "warnings": [str(w.message) for w in caught if "packattn" in str(w.message)],
    }


def fallback_warnings(what: str) -> list[str]:
    """Messages of the warnings that two calls of one kind bring."""
    import warnings

    import packattn

    dim, dtype = {"head_dim": (12, torch.float32), "float64": (16, torch.float64), "served": (16, torch.float32)}[what]
    q = torch.randn(6, 2, dim, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            packing = packattn.Packing.from_lengths([4, 2])
            packattn.attention(q, q, q, packing).sum().backward()
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def peak_memory(lengths: str) -> dict[str, int]:
    """Peak resident memory of forward and backward, in bytes above inputs, outputs and gradients: T = 65536, H = 8, D = 64."""
    import packattn

    tokens, heads, dim = 65536, 8, 64
    runs = json.loads(lengths)
    assert sum(runs) == tokens
    torch.set_num_threads(2)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, packing: Any) -> Any:
        out, lse = packattn.attention(q, k, v, packing, return_lse=True)
        return out, lse, torch.autograd.grad(out, (q, k, v), dout)

    def status(key: str) -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
        return int(line.split()[1]) * 1024

    # Everything that is loaded or allocated once, whatever the size, is there before the count starts.
    small = [torch.randn(512, heads, dim).requires_grad_() for _ in range(3)]
    step(*small, torch.randn(512, heads, dim), packattn.Packing.from_lengths([300, 212]))
    packing = packattn.Packing.from_lengths(runs)
    q, k, v = (torch.randn(tokens, heads, dim).requires_grad_() for _ in range(3))
    dout = torch.randn(tokens, heads, dim)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    out, lse, grads = step(q, k, v, dout, packing)
    peak = status("VmHWM")
    results = sum(t.nbytes for t in (out, lse, *grads))
    assert all(bool(torch.isfinite(t).all()) for t in (lse, *grads))
    return {"above": peak - before - results, "q": q.nbytes, "results": results}


def address_space_of_backward() -> dict[str, int]:
    """Bytes of address space that a backward of one long document adds, in bfloat16, with 16 threads and one kv head; and
    the bytes of its query gradient in float32."""
    import packattn

    tokens, heads, dim = 16384, 8, 64
    torch.set_num_threads(16)
    packing = packattn.Packing.from_lengths([tokens])

    def step(dtype: torch.dtype) -> None:
        q, k = (torch.randn(tokens, h, dim, dtype=dtype).requires_grad_() for h in (heads, 1))
        packattn.attention(q, k, k, packing, window_size=(64, 0)).sum().backward()

    def peak() -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmPeak"))
        return int(line.split()[1]) * 1024

    step(torch.float32)  # starts the threads, and takes more memory for everything but the sums
    before = peak()
    step(torch.bfloat16)
    return {"added": peak() - before, "sums": tokens * heads * dim * 4}


def memory_after_many_calls() -> dict[str, int]:
    """Resident bytes after the calls of one round, and after twenty more rounds."""
    from cases import BFLOAT16, FLOAT32, SUBSET
    from helpers import inputs, run

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    prepared = [(case, inputs(case, dtype)) for case in SUBSET for dtype in (FLOAT32, BFLOAT16)]

    def round_() -> None:
        for case, x in prepared:
            run(case, x)

    for _ in range(3):
        round_()
    early = resident()
    for _ in range(20):
        round_()
    return {"early": early, "later": resident()}


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    torch.set_num_threads(2)
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
