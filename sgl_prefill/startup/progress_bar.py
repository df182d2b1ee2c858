"""How far work is, on stderr: in a terminal a bar in one line, elsewhere a line a minute."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm
from tqdm.utils import disp_trim

TERMINAL_EVERY_S, FILE_EVERY_S = 0.25, 60.0
DEFAULT_COLUMNS = 80  # of a terminal that does not say


class ProgressBar:
    """n_all: size of the work, in any unit; None: unknown, and the elapsed time is shown."""

    def __init__(self, n_all: float | None = None, *, out: TextIO | None = None) -> None:
        self._n_all = n_all
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._began_s = time.monotonic()
        self._next_s = self._began_s + (0.0 if self._is_terminal else FILE_EVERY_S)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes the bar: what follows begins in the first column."""
        self._clear()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def show(self, n_done: float, what: str, *details: str) -> None:
        """Shows this state if the last one is old enough. A terminal cuts the line at its end, so the details come last."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_EVERY_S if self._is_terminal else FILE_EVERY_S)
        line = self.line(n_done, what, *details)
        if not self._is_terminal:
            self.say(line)
            return
        self._clear()
        columns = os.get_terminal_size(self._out.fileno()).columns or DEFAULT_COLUMNS
        self._out.write(disp_trim(line, columns - 1))  # a full line would move to the next
        self._out.flush()

    def line(self, n_done: float, what: str, *details: str) -> str:
        if not self._n_all:
            return ", ".join((what, tqdm.format_interval(self.elapsed_s), *details))
        share = min(n_done / self._n_all, 1.0)
        bar_format = "{percentage:3.0f}%|{bar:10}| " if self._is_terminal else "{percentage:.0f}%, "
        bar: str = tqdm.format_meter(share, 1.0, 0, ascii=True, bar_format=bar_format)
        left = () if (left_s := self.left_s(n_done)) is None else (f"{tqdm.format_interval(left_s)} left",)
        return bar + ", ".join((what, *left, *details))

    def left_s(self, n_done: float) -> float | None:
        """Seconds until the end at the speed so far."""
        return self.elapsed_s * (self._n_all / n_done - 1) if self._n_all and n_done > 0 else None

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bar."""
        self._clear()
        print(text, file=self._out, flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()
