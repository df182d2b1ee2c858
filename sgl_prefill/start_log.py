"""What a start prints: our own lines at once, all others held back until it fails, by a small process that every line passes.

The launcher's stdout and stderr become pipes before anything is imported, and all processes that it starts inherit them. So
nothing depends on who prints, how, or in which process: imports, compiled libraries and loggers alike. The process reads the
pipes, shows lines that are marked as ours, says every few seconds what is going on, and keeps the rest. Once the server is
ready it passes everything on as it comes; where the start ends before that, it prints all that it has kept, in order.

This module is both sides, and imports nothing but the standard library: `python start_log.py FD...` is the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence

MARK = "\x1e"  # ASCII's record separator, first in a line that is ours to show and not part of the log
READY, END = f"{MARK}ready", f"{MARK}end"
OURS = b"sgl_prefill: "
# They follow what has been held back.
LAST_WORDS = (b"sgl_prefill: cannot start", b"sgl_prefill: a process has failed", b"sgl_prefill: ended by Ctrl-C")
INTERRUPTED = b"sgl_prefill: ended by Ctrl-C before it served"  # by somebody who reads no log now
QUIET_S = 10.0  # until it is said again what is going on
FLUSH_TIMEOUT_S = 5.0
CHUNK_BYTES = 1 << 16

_saved: tuple[int, int] | None = None  # in the launcher: its own stdout and stderr
_has_ended = -1  # a pipe whose other end the process holds
_started_s = 0.0
_is_ready = False


def shows_all(flags: Sequence[str]) -> bool:
    """Tells whether the user wants to see every line as it comes: `--log-level debug`."""
    level = ""
    for flag, value in zip(flags, [*flags[1:], ""], strict=False):
        if flag == "--log-level":
            level = value
        elif flag.startswith("--log-level="):
            level = flag.partition("=")[2]
    return level.lower() == "debug"


def begin() -> None:
    """Puts the process between this one and its stdout and stderr. Call it before threads are started."""
    global _saved, _has_ended, _started_s
    sys.stdout.flush()
    sys.stderr.flush()
    _started_s = time.monotonic()
    out_read, out_write = os.pipe()
    error_read, error_write = os.pipe()
    _has_ended, alive = os.pipe()
    for fd in (out_read, error_read, alive):
        os.set_inheritable(fd, True)
    _saved = os.dup(1), os.dup(2)
    child = os.fork()
    if (
        child == 0
    ):  # forked once more, so that it is nobody's child: a launcher ends all of its own before their last words are read
        with contextlib.suppress(BaseException):
            if os.fork() == 0:
                os.execv(
                    sys.executable, [sys.executable, "-I", "-S", __file__, *map(str, (out_read, error_read, alive))]
                )
        os._exit(0)
    os.waitpid(child, 0)
    for fd, write in ((1, out_write), (2, error_write)):
        os.dup2(write, fd)
        os.close(write)
    for fd in (out_read, error_read, alive):
        os.close(fd)
    say("starts: imports SGLang, which takes most of a start")


def is_on() -> bool:
    """Tells whether this process, a launcher, has begun a log that holds lines back."""
    return _saved is not None


def say(text: str) -> None:
    """Shows a line now, in a process whose log is held back."""
    _write("\n".join(f"{MARK}sgl_prefill: {line}" for line in text.splitlines()))


def show_ours() -> None:
    """Shows what our own modules log in this process, from now on until `hide_ours`."""
    logger = logging.getLogger("sgl_prefill")
    if not any(isinstance(handler, _Shown) for handler in logger.handlers):
        logger.addHandler(_Shown(logging.INFO))


def hide_ours() -> None:
    """Ends `show_ours`: this process's part of the start is over."""
    logger = logging.getLogger("sgl_prefill")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _Shown)]


class _Shown(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warning = "warning: " if record.levelno >= logging.WARNING else ""
        say(f"{warning}{record.getMessage()}")


def ready(text: str) -> None:
    """Shows the last lines of a start in the launcher; from now on every line is passed on as it comes."""
    if _saved is None:
        return
    global _is_ready
    _is_ready = True
    hide_ours()
    say(f"{text}, after {time.monotonic() - _started_s:.0f} s")
    _write(READY)


def heed_interrupt() -> None:
    """Lets Ctrl-C end the start with one line and status 130, wherever the launcher is. Its children inherit this, and go on: the
    launcher ends them, and each would print where it was."""
    launcher = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() != launcher:
            return
        if _is_ready:  # then the HTTP server has ended in its own way
            raise KeyboardInterrupt
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.write(2, INTERRUPTED + b"\n")
        end()
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)


def end() -> None:
    """Waits until all that was printed has been shown. For a launcher that is about to end, however."""
    global _saved
    if _saved is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _write(END)
    for fd, saved in zip((1, 2), _saved, strict=True):
        os.dup2(saved, fd)
    _saved = None
    with selectors.DefaultSelector() as waiting:
        waiting.register(_has_ended, selectors.EVENT_READ)
        waiting.select(FLUSH_TIMEOUT_S)


def _write(lines: str) -> None:
    sys.stderr.flush()
    os.write(2, f"{lines}\n".encode())


class Pump:
    """The process between: bytes of two pipes in, bytes to show out."""

    def __init__(self, show_every_s: float = QUIET_S) -> None:
        self._show_every_s = show_every_s
        self._held: list[tuple[int, bytes]] = []  # in order: where each line goes, and the line
        self._partial = {1: b"", 2: b""}
        self._phase = b"starts"
        self._started_s = time.monotonic()
        self._said_s = self._started_s
        self._is_ready = self._has_ended = False

    def run(self, out_read: int, error_read: int) -> None:
        """Reads until both pipes are closed or the launcher says that it ends."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(out_read, selectors.EVENT_READ, 1)
            waiting.register(error_read, selectors.EVENT_READ, 2)
            while waiting.get_map() and not self._has_ended:
                # stderr first: what was on stdout before the launcher said something there has come by now too, and all that a
                # pipe holds is read at once; what came after it is not taken for a part of the start.
                found = waiting.select(None if self._is_ready else 1.0)
                for key, _ in sorted(found, key=lambda event: event[0].data, reverse=True):
                    if data := os.read(key.fd, CHUNK_BYTES):
                        self.take(key.data, data)
                    else:
                        waiting.unregister(key.fd)
                self.tick(time.monotonic())
        self.finish()

    def take(self, fd: int, data: bytes) -> None:
        """Shows or holds what came for stdout (1) or stderr (2)."""
        if self._is_ready:
            self._pass_on(fd, data)
            return
        *lines, self._partial[fd] = (self._partial[fd] + data).split(b"\n")
        for n_taken, line in enumerate(lines, 1):
            if line == READY.encode():
                rest, self._partial[fd] = b"\n".join([*lines[n_taken:], self._partial[fd]]), b""
                self._be_ready()
                self._pass_on(fd, rest)
                return
            self._take_line(fd, line)

    def tick(self, now_s: float) -> None:
        """Says what is going on where nothing was shown for a while."""
        if not self._is_ready and not self._has_ended and now_s - self._said_s >= self._show_every_s:
            self._said_s = now_s
            write(2, OURS + b"%d s, last: %s\n" % (now_s - self._started_s, self._phase))

    def finish(self) -> None:
        """Prints all that was held back, where the server has never been ready."""
        if self._is_ready:
            return
        if any(line == INTERRUPTED for _, line in self._held):
            n_held = sum(not line.startswith(OURS) for _, line in self._held)
            write(2, INTERRUPTED + b"; %d lines of its log are not shown: --log-level debug shows them\n" % n_held)
            return
        for fd, rest in self._partial.items():
            if rest:
                self._held.append((fd, rest))
        if self._held and not self._held[0][1].startswith(LAST_WORDS):
            write(2, OURS + b"the start has ended, all of its log:\n")
        for fd, line in self._held:
            write(fd, line + b"\n")

    def _take_line(self, fd: int, line: bytes) -> None:
        if line == END.encode():
            self._has_ended = True
        elif line.startswith(MARK.encode()):
            self._show(line[1:])
        else:
            self._held.append((fd, line))
            if line.startswith(OURS) and not line.startswith(LAST_WORDS):
                self._show(line)

    def _show(self, line: bytes) -> None:
        self._phase = line.removeprefix(OURS)[:100]
        self._said_s = time.monotonic()
        write(2, line + b"\n")

    def _be_ready(self) -> None:
        n_held = sum(not line.startswith(OURS) for _, line in self._held)
        write(2, OURS + b"%d lines of the start are not shown: --log-level debug shows them\n" % n_held)
        self._is_ready, self._held = True, []
        for fd in (1, 2):
            rest, self._partial[fd] = self._partial[fd], b""
            write(fd, rest)

    def _pass_on(self, fd: int, data: bytes) -> None:
        end = f"{END}\n".encode()
        if data.endswith(end):
            data, self._has_ended = data[: -len(end)], True
        write(fd, data)


def write(fd: int, data: bytes) -> None:
    """Writes all of it, or nothing where nobody reads any more: the server goes on."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def main(arguments: Sequence[str]) -> None:
    """Is the process between, until the last process of the server has ended."""
    for ignored in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # of a terminal: the launcher heeds them
        signal.signal(ignored, signal.SIG_IGN)
    out_read, error_read, _ = map(int, arguments)
    Pump().run(out_read, error_read)


if __name__ == "__main__":
    main(sys.argv[1:])
