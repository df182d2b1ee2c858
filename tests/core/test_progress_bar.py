"""What a terminal and a file show of long work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import time
from io import StringIO

import pytest

from sgl_prefill.startup.progress_bar import FILE_EVERY_S, ProgressBar

DETAILS = ("840 of 2,000 rows", "12,345 tokens/s", "8.0% saved (most: 9.0%)", "in a wide terminal only " * 4)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def shown_by(screen: int) -> str:
    """All that was written, after the program has closed its side."""
    shown = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(screen, 10_000):
            shown += part
    os.close(screen)
    return shown.decode()


def test_a_bar_stays_in_one_line_of_a_terminal(clock: Clock) -> None:
    """Lines of 103 characters had left a line each half second in 80 columns."""
    screen, program = os.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(program, "w") as out, ProgressBar(2000, out=out) as bar:
        clock.now_s += 84
        bar.show(840, *DETAILS)
        bar.say("one line that stays")
    _, line, *rest = shown_by(screen).split("\r\x1b[K")
    assert line.startswith(" 42%|####2     | 840 of 2,000 rows, 01:56 left, 12,345 tokens/s")
    assert len(line) == 79
    assert rest == ["one line that stays\r\n", ""]


def test_a_file_gets_plain_lines_at_most_each_minute(clock: Clock) -> None:
    out = StringIO()
    with ProgressBar(300, out=out) as bar:
        for n_done in range(0, 300, 5):
            bar.show(n_done, f"{n_done} rows")
            clock.now_s += FILE_EVERY_S / 20
        bar.say("done")
    assert out.getvalue().splitlines() == ["33%, 100 rows, 02:00 left", "67%, 200 rows, 01:00 left", "done"]
    assert "\r" not in out.getvalue()


def test_work_of_unknown_size_shows_the_time_so_far(clock: Clock) -> None:
    bar = ProgressBar(out=StringIO())
    clock.now_s += 34
    assert bar.line(0, "starts 2 engines") == "starts 2 engines, 00:34"
