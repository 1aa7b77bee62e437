"""Writes ptx_sm90_wgmma.cuh: wgmma.mma_async m64nNk16 for the N that tiles ask for.

    python csrc/cuda/generate_wgmma.py            # writes the file
    python csrc/cuda/generate_wgmma.py --check    # fails if the file is not what would be written

A PTX instruction names each of its registers (128 accumulators for N = 256), so the text is made by a program.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

COLUMNS = (32, 48, 64, 80, 96, 112, 128, 176, 192, 256)
FILE = Path(__file__).with_name("ptx_sm90_wgmma.cuh")
HEAD = """\
// Written by generate_wgmma.py; included by ptx_sm90.cuh, which says what these functions do.
#pragma once

// clang-format off
namespace packattn::cuda::ptx {
"""
TAIL = """
#undef PACKATTN_WGMMA
}  // namespace packattn::cuda::ptx
// clang-format on
"""


def wrapped(items: list[str], indent: int = 0) -> str:
    """Items over as many lines as they need, each ending in a backslash but the last."""
    lines = textwrap.wrap(", ".join(items), 106 - indent, break_long_words=False)
    return " \\\n".join(" " * (indent + 4) + line for line in lines)


def function(n: int, from_registers: bool) -> str:
    """One function: N = n columns, A from registers or from shared memory."""
    count = n // 2
    a = [f"%{count + i}" for i in range(4)] if from_registers else [f"%{count}"]
    b, flag, transposes = count + len(a), count + len(a) + 1, count + len(a) + 2
    operand = "{" + ", ".join(a) + "}" if from_registers else a[0]
    inputs = ['"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'] if from_registers else ['"l"(a)']
    inputs.append('"l"(b)')
    inputs.append('"r"(static_cast<int>(accumulate))')
    inputs += ['"n"(B_MN ? 1 : 0)'] if from_registers else ['"n"(A_MN ? 1 : 0)', '"n"(B_MN ? 1 : 0)']
    tail = f"%{transposes}" if from_registers else f"%{transposes}, %{transposes + 1}"
    name, parameter = ("wgmma_rs", "const uint32_t (&a)[4]") if from_registers else ("wgmma_ss", "uint64_t a")
    arguments = "class T, bool B_MN" if from_registers else "class T, bool A_MN, bool B_MN"
    return f"""
#define PACKATTN_WGMMA(type) \\
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{flag}, 0;\\n" \\
               "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." type "." type " " PACKATTN_REGISTERS_{n} \\
               ", {operand}, %{b}, p, 1, 1, {tail};\\n}}" \\
               : PACKATTN_ACCUMULATORS_{n} \\
               : {wrapped(inputs, 13).lstrip()})
template <{arguments}>
PACKATTN_DEVICE void {name}(float (&d)[{count}], {parameter}, uint64_t b, bool accumulate) {{
  if constexpr (is_f16<T>) {{
    PACKATTN_WGMMA("f16");
  }} else {{
    PACKATTN_WGMMA("bf16");
  }}
}}
#undef PACKATTN_WGMMA
"""


def text() -> str:
    parts = [HEAD]
    for n in COLUMNS:
        registers = [f"%{i}" for i in range(n // 2)]
        lines = textwrap.wrap("{" + ", ".join(registers) + "}", 100, drop_whitespace=False)
        parts.append(f"\n#define PACKATTN_REGISTERS_{n} \\\n" + " \\\n".join(f'    "{line}"' for line in lines) + "\n")
        accumulators = [f'"+f"(d[{i}])' for i in range(n // 2)]
        parts.append(f"#define PACKATTN_ACCUMULATORS_{n} \\\n" + wrapped(accumulators) + "\n")
        parts += [function(n, False), function(n, True)]
        parts.append(f"#undef PACKATTN_REGISTERS_{n}\n#undef PACKATTN_ACCUMULATORS_{n}\n")
    return "".join(parts) + TAIL.replace("#undef PACKATTN_WGMMA\n", "")


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return int(FILE.read_text(encoding="utf-8") != text())
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
