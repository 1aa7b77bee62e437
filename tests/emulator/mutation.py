"""One deliberate break of a kernel, as the lists in mutations/ hold them."""

from __future__ import annotations

from dataclasses import dataclass

REPORT, NUMBERS, SANITIZER = "report", "numbers", "sanitizer"


@dataclass(frozen=True)
class Mutation:
    """A text that is replaced by another, and who must notice.

    name: what is broken, in words. file: from the root of the project. old: must stand in the file exactly once, or
    `count` times; all of them are replaced. arguments: of the program, instead of the list's.
    caught: REPORT, the emulator complains; NUMBERS, a program's own checks fail (a report will do as well); SANITIZER,
    AddressSanitizer or UBSan stops a program built with them (the other two will do as well).
    """

    name: str
    file: str
    old: str
    new: str
    caught: str = REPORT
    count: int = 1
    arguments: tuple[str, ...] | None = None
