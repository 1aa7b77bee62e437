"""The CPU kernels and the metadata loops under AddressSanitizer and UndefinedBehaviorSanitizer, and under
ThreadSanitizer: the case table, every instruction set this machine has, and ranges that nobody should pass."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import CASES, Case

SOURCE = Path(__file__).parent / "native"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on the path"),
    pytest.mark.skipif(not (SOURCE / "../../csrc").exists(), reason="not in a source tree"),
]


def checked(*command: object, **environment: str) -> str:
    process = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=1800,
        check=False,
    )
    output = process.stdout + process.stderr
    assert process.returncode == 0, f"{' '.join(map(str, command))}\n{output[-8000:]}"
    return output


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("sanitize")
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    checked("cmake", *generator, "-S", SOURCE, "-B", build, f"-DPACKATTN_SANITIZE={request.param}")
    checked("cmake", "--build", build, "--parallel", os.environ.get("MAX_JOBS", "2"))
    return build


# ---- calls -----------------------------------------------------------------------------------------------------------


def line(
    case: Case, begin: list[int], end: list[int], dtype: str, layout: str, threads: int, outcome: str = "served"
) -> str:
    """A call as attention_cases.cpp reads it."""
    (hq, hkv), (d, dv) = case.heads, case.dims
    scale = d**-0.5 if case.scale is None else case.scale
    numbers = [threads, len(begin), case.total_k, hq, hkv, d, dv, scale, case.softcap, int(case.sinks)]
    return " ".join(map(str, [case.name, dtype, layout, outcome, *numbers, *begin, *end]))


def table() -> Iterator[str]:
    """Every case of the table that is small enough for a sanitizer, dtypes, layouts and threads taking turns."""
    n = 0
    for case in CASES:
        served = all(dim % 8 == 0 and 8 <= dim <= 512 for dim in case.dims)
        if case.slow or not served or case.total_q * case.total_k * case.heads[0] > 2**21:
            continue
        begin, end = (x.tolist() for x in case.packing().key_ranges(case.packing_k(), **case.mask_options()))
        for dtype in ("float32", "bfloat16", "float16"):
            layout = ("contiguous", "sliced", "transposed", "expanded")[n % 4]
            yield line(case, begin, end, dtype, layout, (3, 1, -3)[n % 3])
            n += 1


def hostile() -> Iterator[str]:
    """Ranges on the edge of what is allowed, and past it."""
    shape = Case("", (9,), k=(7,), heads=(4, 2), dims=(24, 8), sinks=True)
    rows = range(9)
    served: dict[str, tuple[list[int], list[int]]] = {
        "empty_rows_hold_anything": (
            [INT32_MAX, 0, INT32_MAX, 2, -1, 3, 7, INT32_MAX, INT32_MIN],
            [INT32_MIN, 2, 0, 4, -1, 7, 7, INT32_MAX, INT32_MIN],
        ),
        "all_empty": ([INT32_MAX] * 9, [INT32_MIN] * 9),
        "last_key_only": ([6] * 9, [7] * 9),
        "everything": ([0] * 9, [7] * 9),
        "one_key_each": ([min(i, 6) for i in rows], [min(i, 6) + 1 for i in rows]),
        "gaps": ([i // 3 * 3 for i in rows], [min(i // 3 * 3 + 1, 7) for i in rows]),
    }
    refused: dict[str, tuple[list[int], list[int]]] = {
        "begin_negative": ([-1] + [0] * 8, [7] * 9),
        "begin_int32_min": ([INT32_MIN] * 9, [7] * 9),
        "end_past_total": ([0] * 9, [7] * 8 + [8]),
        "end_int32_max": ([0] * 9, [INT32_MAX] * 9),
        "both_extremes": ([INT32_MIN] * 9, [INT32_MAX] * 9),
        "begin_decreases": ([0, 1, 2, 3, 2, 3, 4, 5, 6], [7] * 9),
        "end_decreases": ([0] * 9, [1, 2, 3, 4, 5, 6, 7, 6, 7]),
        "decreases_over_empty": ([3, INT32_MAX, 2] + [3] * 6, [4, 0, 5] + [7] * 6),
    }
    for outcome, calls in (("served", served), ("refused", refused)):
        for name, (begin, end) in calls.items():
            for dtype in ("float32", "bfloat16"):
                yield line(replace(shape, name=name), begin, end, dtype, "sliced", 2, outcome)


def random_calls(count: int) -> Iterator[str]:
    """Random shapes with random nondecreasing ranges, which no packing would give."""
    generator = torch.Generator().manual_seed(7)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for n in range(count):
        total_q, total_k = below(200), below(200)
        group, heads = 1 + below(4), 1 + below(3)
        shape = Case(
            f"random_{n}",
            (total_q,),
            k=(total_k,),
            heads=(group * heads, heads),
            dims=(8 * (1 + below(10)), 8 * (1 + below(10))),
            softcap=(0.0, 5.0)[below(2)],
            sinks=below(2) == 0,
        )
        ends = [torch.randint(total_k + 1, (total_q,), generator=generator).sort().values for _ in range(2)]
        begin, end = torch.minimum(*ends), torch.maximum(*ends)
        begin, end = begin.sort().values, end.sort().values
        if below(2):
            begin = begin // 32 * 32
        if below(2):
            end[torch.rand(total_q, generator=generator) < 0.2] = 0
        dtype = ("float32", "bfloat16", "float16")[below(3)]
        layout = ("contiguous", "sliced", "transposed", "expanded")[below(4)]
        yield line(shape, begin.tolist(), end.tolist(), dtype, layout, (4, 1, -2)[below(3)])


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_attention(programs: Path, tmp_path: Path) -> None:
    calls = [*table(), *hostile(), *random_calls(60)]
    file = tmp_path / "calls.txt"
    file.write_text("\n".join(calls) + "\n")
    isas = checked(programs / "attention_cases", "--isas").split()
    assert "portable" in isas
    for isa in isas:
        output = checked(programs / "attention_cases", file, PACKATTN_CPU_ISA=isa)
        assert f"{isa}: {len(calls)} calls, 0 failed" in output


def test_metadata(programs: Path) -> None:
    assert "answered" in checked(programs / "metadata_hostile", 20000)


def test_a_wrong_result_is_found(programs: Path, tmp_path: Path) -> None:
    """The program itself: a call that is said to be refused and is served is a failure."""
    case = Case("served_after_all", (3,), dims=(8, 8))
    file = tmp_path / "calls.txt"
    file.write_text(line(case, [0, 0, 0], [1, 2, 3], "float32", "contiguous", 1, "refused") + "\n")
    process = subprocess.run(
        [programs / "attention_cases", file], text=True, capture_output=True, timeout=60, check=False
    )
    assert process.returncode == 1 and "wrong ranges were served" in process.stderr
