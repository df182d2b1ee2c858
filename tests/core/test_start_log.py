"""What a start shows, what it holds back, and that nothing of it is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgl_prefill import start_log
from sgl_prefill.start_log import END, MARK, READY, Pump


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """What the pump wrote, and where to."""
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(start_log, "write", lambda fd, data: written.append((fd, data)) if data else None)
    return written


def text_of(shown: list[tuple[int, bytes]], *fds: int) -> str:
    return b"".join(data for fd, data in shown if fd in (fds or (1, 2))).decode()


def test_a_line_of_ours_is_shown_at_once_and_others_are_held_back(shown: list[tuple[int, bytes]]) -> None:
    pump = Pump()
    pump.take(2, f"Warning: Triton is not there\n{MARK}sgl_prefill: measures\nsgl_prefill: fetches\n".encode())
    assert text_of(shown) == "sgl_prefill: measures\nsgl_prefill: fetches\n"


def test_a_start_that_fails_shows_all_lines_in_order_and_its_reason_last(shown: list[tuple[int, bytes]]) -> None:
    """Lines of a log that were held back would have been lost with the process that held them."""
    pump = Pump()
    pump.take(2, b"first\nTrace")
    pump.take(1, b"on stdout\n")
    pump.take(2, b"back\nsgl_prefill: cannot start\nthe reason\n" + f"{END}\n".encode())
    pump.finish()
    lines = text_of(shown).splitlines()
    assert lines[1:] == ["first", "on stdout", "Traceback", "sgl_prefill: cannot start", "the reason"]
    assert text_of(shown, 1) == "on stdout\n"


def test_a_refusal_before_anything_else_is_one_message(shown: list[tuple[int, bytes]]) -> None:
    pump = Pump()
    pump.take(2, b"sgl_prefill: cannot start\nthe reason\n")
    pump.finish()
    assert text_of(shown) == "sgl_prefill: cannot start\nthe reason\n"


def test_a_start_that_is_interrupted_ends_in_one_line(shown: list[tuple[int, bytes]]) -> None:
    """Sixty lines of SGLang's imports had followed, and a traceback of each process."""
    pump = Pump()
    pump.take(2, b"first\nsecond\n" + start_log.INTERRUPTED + f"\n{END}\n".encode())
    pump.finish()
    (line,) = text_of(shown).splitlines()
    assert line.startswith("sgl_prefill: ended by Ctrl-C before it served; 2 lines")


def test_a_server_that_is_ready_prints_as_it_would_without_us(shown: list[tuple[int, bytes]]) -> None:
    """Also what came with the last line of the start, unfinished lines, and bytes that are no text."""
    pump = Pump()
    pump.take(2, f"held\n{READY}\nafter\nhal".encode())
    pump.take(2, b"f\r\xff")
    pump.take(2, f"last\n{END}\n".encode())
    pump.finish()
    (first, *rest) = shown
    assert first[1].startswith(b"sgl_prefill: 1 lines of the start are not shown")
    assert b"".join(data for _, data in rest) == b"after\nhalf\r\xfflast\n"


def test_silence_is_broken_by_what_is_going_on(shown: list[tuple[int, bytes]]) -> None:
    pump = Pump(show_every_s=5.0)
    pump.take(2, f"{MARK}sgl_prefill: measures\n".encode())
    shown.clear()
    pump.tick(pump._said_s + 4.9)
    assert shown == []
    pump.tick(pump._said_s + 5.1)
    assert text_of(shown).endswith("s, last: measures\n")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--log-level", "debug"], True),
        (["--log-level=DEBUG"], True),
        (["--log-level", "info"], False),
        (["--log-level"], False),
        ([], False),
    ],
)
def test_log_level_debug_shows_all(flags: list[str], expected: bool) -> None:
    assert start_log.shows_all(flags) is expected


LAUNCHER = """
import logging, os, subprocess, sys
from sgl_prefill import start_log
start_log.begin()
start_log.show_ours()
subprocess.run(["sh", "-c", "echo from a child; echo on its stderr >&2"], check=True)
logging.getLogger("sgl_prefill.part").warning("mind this")
if "fails" in sys.argv:
    print("sgl_prefill: cannot start\\nthe reason", file=sys.stderr)
    start_log.end()
    os._exit(2)
start_log.ready("serves")
subprocess.run(["sh", "-c", "echo afterwards"], check=True)
start_log.end()
"""


INTERRUPTED = """
import os, signal, subprocess, sys
from sgl_prefill import start_log
start_log.heed_interrupt()
start_log.begin()
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGINT)  # as a terminal sends it to all
    print("a child goes on", flush=True)
    signal.pause()
os.waitid(os.P_PID, child, os.WNOHANG | os.WEXITED)
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    print("an import catches all")
"""


def test_ctrl_c_ends_a_launcher_and_its_children_with_status_130_and_no_traceback() -> None:
    """Wherever it is: what it imports may catch everything."""
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr + done.stdout
    assert "catches all" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("sgl_prefill: ended by Ctrl-C before it served")


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_launcher_that_fails_loses_nothing_of_its_children_and_keeps_its_status() -> None:
    """Its last words are last also where it ends at once, as the first process of a container does."""
    done = launched("fails")
    assert done.returncode == 2
    shown, replayed = done.stderr.split("sgl_prefill: the start has ended, all of its log:\n")
    assert "sgl_prefill: starts" in shown
    assert "sgl_prefill: warning: mind this\n" in shown
    assert "on its stderr" not in shown
    assert replayed == "on its stderr\nsgl_prefill: cannot start\nthe reason\n"
    assert done.stdout == "from a child\n"


def test_a_launcher_that_serves_loses_nothing_that_comes_after_its_start() -> None:
    """A line on stdout that came together with the last one of the start on stderr was held back with it, and lost."""
    done = launched()
    assert done.returncode == 0
    assert done.stdout.endswith("afterwards\n")
    *_, serves, held = done.stderr.splitlines()
    assert serves == "sgl_prefill: serves, after 0 s"
    assert "lines of the start are not shown" in held
