"""Loops in machine code, and the instructions that one round of them issues.

The rule, the same for every kernel: among all ways through the body of a loop, from its first instruction back to it,
take those that execute the most tensor-core instructions, of these the ones that start the most copies to shared memory,
and of these the one with the fewest instructions. That is a full block in the middle of a document: the next one is
fetched, the code for masks is jumped over, and so is whatever else a kernel skips when there is nothing to do.
Predicated instructions count: they are issued whether or not they do anything.
"""

from __future__ import annotations

import collections
import dataclasses
import re

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;")
TENSOR_CORE = ("HMMA", "HGMMA", "IMMA", "QGMMA", "BGMMA")
COPY = ("LDGSTS", "UTMALDG", "UBLKCP")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def predicate(self) -> str:
        found = re.match(r"@(!?U?P\w+)\s", self.text)
        return found[1] if found else ""

    @property
    def opcode(self) -> str:
        """The name with its modifiers."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        found = re.search(r"\b0x([0-9a-f]+)\s*$", self.text) if self.name in ("BRA", "CALL") else None
        return int(found[1], 16) if found else None


def parse(text: str) -> list[Instruction]:
    """The instructions of a kernel as cuobjdump -sass or nvdisasm prints them."""
    return [Instruction(int(m[1], 16), m[2]) for line in text.splitlines() if (m := LINE.match(line))]


def successors(code: list[Instruction], index: dict[int, int], at: int) -> list[int]:
    """Where control may go next. A jump by table (BRX) is taken for its first case: the cases stand behind it."""
    i = code[at]
    behind = [at + 1] if at + 1 < len(code) else []
    target = index.get(i.target) if i.target is not None else None
    if i.name in ("EXIT", "RET"):
        return behind if i.predicate else []
    if i.name == "CALL":  # the assembler spells some jumps out of a loop as a call that never returns
        if target is None or not 0 < code[target].address - i.address <= 0x40:
            return behind
        return [*behind, target] if i.predicate else [target]
    if i.name == "BRA" and target is not None:
        conditional = bool(i.predicate) or ".DIV" in i.opcode or re.search(r"BRA\S*\s+!?U?P\d", i.text)
        return [*behind, target] if conditional else [target]
    return behind


def _plus(score: tuple[int, int, int], name: str, count: int) -> tuple[int, int, int]:
    """(tensor-core instructions, copies, instructions below 0) and `count` instructions more."""
    tensor_core, copies, issued = score
    if name == "NOP":
        return score
    return tensor_core + count * (name in TENSOR_CORE), copies + count * (name in COPY), issued - count


@dataclasses.dataclass
class Round:
    """What one round of a loop issues. opcodes: how many of each, with their modifiers ("LDSM.16.M88.4"). path: the
    instructions in their order, those of inner loops once."""

    first: int
    last: int
    opcodes: collections.Counter[str]
    whole: int  # instructions in the body, on any way
    path: tuple[Instruction, ...] = ()

    @property
    def counts(self) -> collections.Counter[str]:
        """How many by the name alone ("LDSM")."""
        found: collections.Counter[str] = collections.Counter()
        for opcode, count in self.opcodes.items():
            found[opcode.split(".")[0]] += count
        return found

    @property
    def issued(self) -> int:
        return sum(self.opcodes.values())

    @property
    def tensor_core(self) -> int:
        return sum(self.counts[name] for name in TENSOR_CORE)

    @property
    def density(self) -> float:
        return self.tensor_core / self.issued if self.issued else 0.0


@dataclasses.dataclass
class Loop:
    header: int
    body: frozenset[int]
    latches: frozenset[int]


class Program:
    """The control flow of one kernel."""

    def __init__(self, text: str) -> None:
        self.code = parse(text)
        self.index = {i.address: n for n, i in enumerate(self.code)}
        self.next = [successors(self.code, self.index, n) for n in range(len(self.code))]
        self.order = self._order()
        self.loops = self._loops()

    def _order(self) -> dict[int, int]:
        """Reverse postorder: an edge that does not go up in it closes a loop (compilers make reducible flow). What
        cannot be reached is left out."""
        done: list[int] = []
        seen = {0}
        stack = [(0, iter(self.next[0]))] if self.code else []
        while stack:
            at, rest = stack[-1]
            to = next((n for n in rest if n not in seen), None)
            if to is None:
                done.append(at)
                stack.pop()
            else:
                seen.add(to)
                stack.append((to, iter(self.next[to])))
        return {at: place for place, at in enumerate(reversed(done))}

    def _loops(self) -> list[Loop]:
        before: list[list[int]] = [[] for _ in self.code]
        latches: dict[int, set[int]] = collections.defaultdict(set)
        for at in self.order:
            for n in self.next[at]:
                before[n].append(at)
                if self.order[n] <= self.order[at]:
                    latches[n].add(at)
        loops = []
        for header, ends in latches.items():
            body, todo = {header}, [e for e in ends if e != header]
            while todo:
                n = todo.pop()
                if n not in body:
                    body.add(n)
                    todo += before[n]
            loops.append(Loop(header, frozenset(body), frozenset(ends)))
        return sorted(loops, key=lambda loop: len(loop.body))

    def inner(self, loop: Loop) -> list[Loop]:
        """The loops directly inside a loop."""
        inside = [other for other in self.loops if other.body < loop.body and other.header != loop.header]
        return [a for a in inside if not any(a.body < b.body for b in inside)]

    def parent(self, loop: Loop) -> Loop | None:
        around = [other for other in self.loops if loop.body < other.body]
        return min(around, key=lambda other: len(other.body), default=None)

    def round(self, loop: Loop, trips: dict[int, int] | None = None) -> Round:
        """One round of a loop. trips: how often inner loops go round, by header (once where nothing is said)."""
        inner = {other.header: self.round(other, trips) for other in self.inner(loop)}
        best: dict[int, tuple[tuple[int, int, int], int]] = {}  # instruction -> (score before it, the one before)
        ends: list[tuple[tuple[int, int, int], int]] = []
        for at in sorted(loop.body, key=self.order.__getitem__):
            if at != loop.header and at not in best:
                continue
            score = best[at][0] if at in best else (0, 0, 0)
            score = _plus(score, self.code[at].name, 1)
            for opcode, count in self._more(inner, at, trips).items():
                score = _plus(score, opcode.split(".")[0], count)
            for to in self.next[at]:
                if to in loop.body and self.order[to] > self.order[at] and (to not in best or score > best[to][0]):
                    best[to] = (score, at)
            if at in loop.latches:
                ends.append((score, at))
        counts: collections.Counter[str] = collections.Counter()
        path: list[Instruction] = []
        at = max(ends)[1] if ends else -1
        while at >= 0:
            if self.code[at].name != "NOP":
                counts[self.code[at].opcode] += 1
                path.append(self.code[at])
            counts.update(self._more(inner, at, trips))
            at = best[at][1] if at in best and at != loop.header else -1
        return Round(
            self.code[min(loop.body)].address,
            self.code[max(loop.body)].address,
            counts,
            sum(self.code[n].name != "NOP" for n in loop.body),
            tuple(reversed(path)),
        )

    @staticmethod
    def _more(inner: dict[int, Round], at: int, trips: dict[int, int] | None) -> collections.Counter[str]:
        """What the rounds of an inner loop after the first add, seen from its first instruction."""
        more = (trips or {}).get(at, 1) - 1
        if at not in inner or more < 1:
            return collections.Counter()
        return collections.Counter({opcode: more * count for opcode, count in inner[at].opcodes.items()})

    def leaves(self) -> list[tuple[Loop, Round]]:
        """The innermost loops with tensor-core instructions."""
        found = []
        for loop in self.loops:
            round_ = self.round(loop)
            if round_.tensor_core and not any(self.round(other).tensor_core for other in self.inner(loop)):
                found.append((loop, round_))
        return found

    def main_loop(self, tensor_core: int | None = None) -> Round | None:
        """The loop over blocks of keys (or queries): the densest of the innermost loops with tensor-core instructions.
        tensor_core: how many of them one block takes, where known; a loop that has fewer is the inner one of two."""
        found = []
        for loop, round_ in self.leaves():
            if tensor_core and round_.tensor_core < tensor_core:
                around = self.parent(loop)
                trips, rest = divmod(tensor_core, round_.tensor_core)
                if around is None or rest:
                    continue
                round_ = self.round(around, {loop.header: trips})
            if tensor_core and round_.tensor_core % tensor_core:
                continue
            found.append(round_)
        return max(found, key=lambda r: r.density, default=None)
