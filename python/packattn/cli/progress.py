"""Progress of long work: a tqdm bar on a terminal, a few plain lines anywhere else (a log file, a pipe)."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self


class Progress:
    """Counts `total` steps. `advance(text)` reports one, with a short text such as the loss.

    lines: about how many of the steps are printed as lines that stay; 0 for none, only the bar.
    """

    def __init__(self, total: int, label: str, lines: int = 5) -> None:
        self.total, self.label, self.done = total, label, 0
        self._every = max(1, -(-total // lines)) if lines else 0
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # here: `packattn info` is to run in a broken environment too

            self._bar = tqdm(total=total, desc=f"  {label}", file=sys.stderr, dynamic_ncols=True, leave=False)

    def advance(self, text: str = "") -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        if not self._every:
            return
        if self.done == 1 or self.done == self.total or self.done % self._every == 0:
            width = len(str(self.total))
            self._write(f"  {self.label} {self.done:>{width}}/{self.total}  {text}".rstrip())

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
