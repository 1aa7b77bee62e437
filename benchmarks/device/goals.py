"""What was set out to be reached on an H200, beside what a run measured. No Torch in this file."""

from __future__ import annotations

from typing import Any

# Causal documents, none above a quarter of the tokens, at head dim 128 and 64 query heads to 8 key heads.
MIX, HEAD_DIM, HEADS = "mixed", 128, "64/8"
TOTALS = (1024, 2048, 4096, 8192, 16384, 32768)
AHEAD_OF = {"varlen_attn": ("varlen",), "FlashAttention-4": ("varlen_fa4", "fa4")}
# Of cuDNN's rate for one dense causal document of as many tokens.
OF_CUDNN = {32768: 0.90, 4096: 0.75}


def _rates(rows: list[dict[str, Any]], mix: str, tokens: int, direction: str, heads: str) -> dict[str, float]:
    """TFLOP/s by implementation."""
    return {
        r["implementation"]: r["tflops"]
        for r in rows
        if r["status"] == "ok"
        and (r["mix"], r["tokens"], r["direction"], r["heads"]) == (mix, tokens, direction, heads)
        and (r["head_dim"], r["head_dim_v"]) == (HEAD_DIM, HEAD_DIM)
    }


def _cudnn(rows: list[dict[str, Any]], tokens: int, direction: str) -> tuple[float | None, str]:
    """(Its dense rate, a note): with the same heads, or with equal numbers of them where it takes no groups."""
    found = sorted({r["heads"] for r in rows if r["implementation"] == "sdpa_cudnn"}, key=lambda h: h != HEADS)
    for heads in found:
        rate = _rates(rows, "one", tokens, direction, heads).get("sdpa_cudnn")
        if rate is not None:
            return rate, "" if heads == HEADS else f" (cuDNN at {heads} heads)"
    return None, ""


def _verdict(ours: float | None, other: float | None, wanted: float) -> str:
    if ours is None or not other:
        return "not measured"
    share = ours / other
    return f"{share:.2f}, {'reached' if share >= wanted else 'MISSED'}"


def table(rows: list[dict[str, Any]]) -> str:
    """For each direction and total: the best of packattn's families, as a multiple of what it is to be ahead of."""
    what = (
        f'Documents "{MIX}", head dim {HEAD_DIM}, heads {HEADS}: the faster of packattn\'s kernels, and its rate as a '
        "multiple of the others'. cuDNN's is that of one dense causal document of as many tokens. In brackets: what is "
        "wanted."
    )
    lines = [
        "### Goals",
        "",
        what,
        "",
        f"| | tokens | packattn, TFLOP/s | {' | '.join(f'{name} (1)' for name in AHEAD_OF)} | cuDNN, dense |",
        "|---|--:|--:|" + "--:|" * (len(AHEAD_OF) + 1),
    ]
    for direction in ("forward", "backward"):
        for tokens in TOTALS:
            rates = _rates(rows, MIX, tokens, direction, HEADS)
            family, ours = max(
                ((name, rate) for name, rate in rates.items() if name.startswith("packattn")),
                key=lambda one: one[1],
                default=("", None),
            )
            cells = ["not measured" if ours is None else f"{ours:.0f}, {family.removeprefix('packattn').strip()}"]
            for names in AHEAD_OF.values():
                other = max((rates[name] for name in names if name in rates), default=None)
                cells.append(_verdict(ours, other, 1.0))
            if tokens in OF_CUDNN:
                rate, note = _cudnn(rows, tokens, direction)
                cells.append(f"{_verdict(ours, rate, OF_CUDNN[tokens])} ({OF_CUDNN[tokens]:.2f}){note}")
            else:
                cells.append("")
            lines.append(f"| {direction} | {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)
