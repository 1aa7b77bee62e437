"""How long a multiprocessor of a Hopper GPU needs for a main loop: a model, not a measurement.

For each resource the clocks that one round of all consumer warpgroups needs if nothing else did; the round takes as
long as the longest. Latencies, waits, barriers, the ends of tiles and masks are not in it, so it is an upper bound of
the rate.

Rates of one multiprocessor. Tensor cores: 4096 flops a clock, so wgmma m64nNk16 takes N / 2 clocks. Shared memory: 128
bytes a clock; a wgmma reads A (64 x 16) and B (16 x N), in 16 bits, or B alone where A comes from registers, and bulk
copies write through the same port. Ordinary instructions: CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions", compute capability 9.0; a warp's instruction on its quarter takes 1 clock for multiply-add, add and
multiply, 8 for exponentials, 2 for what the ALU does (comparisons, maxima, logic, shifts, packing to 16 bits) and for
integer multiply-add. Each quarter issues one instruction a clock. L2: roofline.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

import roofline
import sass

TENSOR = 4096.0  # flops a clock
SHARED = roofline.H100.shared
L2 = roofline.H100.l2
PEAK = roofline.H100.peak

RESOURCES = ("tensor", "MUFU", "ALU", "FMA", "issue", "shared", "L2")

_FMA = {"FFMA": 1, "FMUL": 1, "FADD": 1, "HFMA2": 1, "HMUL2": 1, "HADD2": 1, "IMAD": 2}
# Beside the uniform datapath (R2UR, VOTEU, U...), they cost their issue alone.
_ISSUE = {
    "HGMMA", "MUFU", "WARPGROUP", "WARPSYNC", "SYNCS", "BAR", "BRA", "CALL", "EXIT", "RET", "BSSY", "BSYNC",
    "NANOSLEEP", "SHFL", "LDS", "STS", "LDSM", "LDG", "STG", "R2UR", "S2R", "ELECT", "FENCE", "DEPBAR", "ERRBAR",
    "MEMBAR",
}  # fmt: skip
_ALU = 2


@dataclasses.dataclass(frozen=True)
class Product:
    """A wgmma: 64 x n x 16, A from registers or from shared memory."""

    n: int
    registers: bool

    @classmethod
    def of(cls, instruction: sass.Instruction) -> Product:
        found = re.match(r"HGMMA\.64x(\d+)x16\.", instruction.opcode)
        if found is None:
            raise ValueError(f"the tensor-core instruction {instruction.opcode} is none that the model knows")
        operands = instruction.text.split(instruction.opcode, 1)[1].split(",")
        return cls(int(found[1]), "gdesc" not in operands[1])

    @property
    def flops(self) -> int:
        return 2 * 64 * self.n * 16

    @property
    def clocks(self) -> float:
        return self.flops / TENSOR

    @property
    def shared_bytes(self) -> int:
        return 32 * self.n + (0 if self.registers else 64 * 16 * 2)

    def __str__(self) -> str:
        return f"m64n{self.n}k16{' RS' if self.registers else ''}"


def products(path: Iterable[sass.Instruction]) -> Counter[Product]:
    return Counter(Product.of(i) for i in path if i.name in sass.TENSOR_CORE)


def arithmetic(path: Iterable[sass.Instruction]) -> dict[str, float]:
    """Clocks of a quarter for what one warp issues."""
    found = dict.fromkeys(("MUFU", "ALU", "FMA", "issue"), 0.0)
    for i in path:
        found["issue"] += 1
        if i.name == "MUFU":
            found["MUFU"] += 8
        elif i.name in _FMA:
            found["FMA"] += _FMA[i.name]
        elif i.name not in _ISSUE and not re.match(r"U[A-Z]|VOTEU", i.name):
            found["ALU"] += _ALU
    return found


def ordinary_bytes(path: Iterable[sass.Instruction]) -> float:
    """What one warp's loads, stores and shuffles take of shared memory's port, without bank conflicts."""
    opcodes = Counter(i.opcode for i in path)
    return roofline.shared_bytes(opcodes) + 128 * sum(n for o, n in opcodes.items() if o.startswith("SHFL"))


def clocks(path: tuple[sass.Instruction, ...], consumers: int, stage_bytes: int, rounds: int = 1) -> dict[str, float]:
    """Clocks for each consumer's share of a round, by resource.

    path: what a warp issues in `rounds` rounds; its warpgroup's other warps issue the same. stage_bytes: what bulk
    copies bring for one round of all consumers.
    """
    used = products(path)
    found = {"tensor": sum(p.clocks * n for p, n in used.items()), **arithmetic(path)}
    read = sum(p.shared_bytes * n for p, n in used.items()) + 4 * ordinary_bytes(path)
    found = {name: value / rounds for name, value in found.items()}
    found["shared"] = (read / rounds + stage_bytes / consumers) / SHARED
    found["L2"] = stage_bytes / consumers / L2
    return {name: found[name] for name in RESOURCES}


@dataclasses.dataclass(frozen=True)
class Waits:
    """Of a round in the steady state: exponentials, and all instructions, that are issued while no product of their
    warpgroup is pending, so that only another warpgroup's can run beside them."""

    exposed_exponentials: int
    exposed: int


def waits(path: tuple[sass.Instruction, ...]) -> Waits:
    """A product with "gsb0" ends a group; WARPGROUP.DEPBAR.LE gsb0, N waits until at most N groups are pending."""
    pending, running, exponentials, exposed = 0, False, 0, 0  # groups that are complete; one that is not
    for counted in (False, True):
        for i in path:
            if i.name in sass.TENSOR_CORE:
                running = "gsb0" not in i.text
                pending += not running
            elif found := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", i.text):
                pending = min(pending, int(found[1], 16))
            elif counted and not pending and not running:
                exposed += 1
                exponentials += i.opcode == "MUFU.EX2"
    return Waits(exponentials, exposed)
