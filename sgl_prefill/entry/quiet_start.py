"""Log output of a start: this package's progress, and warnings and errors of SGLang and other libraries. With `--log-level`
everything that SGLang logs at that level.

Imports nothing slow: the first line is printed before SGLang and PyTorch are imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from types import FrameType

OURS = "sgl_prefill"
# Defaults for imports in this process and its children, whose warnings are mostly about hardware that is not there.
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "TORCH_LOGS": "-all", "TRANSFORMERS_VERBOSITY": "error"}
# The hook registry warns of two hooks on one function, which are intended here.
LEVELS = {"sglang": logging.WARNING, "sglang.srt.plugins.hook_registry": logging.ERROR}
FILTERED = ("uvicorn.error", "uvicorn.access")  # Uvicorn sets their levels when it starts

_started_s: float | None = None  # `time.monotonic`, while the launcher's start is quiet


def begin(flags: Sequence[str]) -> None:
    """Makes the start of this process, the launcher, quiet, unless `flags` set a log level."""
    global _started_s
    if any(flag.partition("=")[0] == "--log-level" for flag in flags):
        return
    _started_s = time.monotonic()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    be_quiet()
    say("starts: imports SGLang, which takes most of a start")


def is_on() -> bool:
    return _started_s is not None


def be_quiet() -> None:
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name in FILTERED:
        logging.getLogger(name).addFilter(_is_warning)
    ours = logging.getLogger(OURS)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    if not any(isinstance(handler, _Progress) for handler in ours.handlers):
        ours.addHandler(_Progress(logging.INFO))


def end() -> None:
    """Makes this process log as SGLang does, if it was quiet."""
    ours = logging.getLogger(OURS)
    if ours.propagate:
        return
    for name in LEVELS:
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name in FILTERED:
        logging.getLogger(name).removeFilter(_is_warning)
    ours.propagate = True
    ours.handlers = [handler for handler in ours.handlers if not isinstance(handler, _Progress)]


def end_launchers(text: str) -> None:
    """Prints that the server is ready, and ends the quiet part of the launcher."""
    global _started_s
    if _started_s is not None:
        say(f"{text}, after {time.monotonic() - _started_s:.0f} s")
    end()
    _started_s = None


def say(text: str) -> None:
    for line in text.splitlines():
        print(f"{OURS}: {line}", file=sys.stderr, flush=True)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


class _Progress(logging.Handler):
    """Prints this package's log messages without time and process."""

    def emit(self, record: logging.LogRecord) -> None:
        warning = "warning: " if record.levelno >= logging.WARNING else ""
        say(f"{warning}{record.getMessage()}")


def end_at_interrupt() -> None:
    """Makes Ctrl-C end a start with one line and status 130, until uvicorn sets its own handler. Forked children inherit this
    handler and ignore the signal: the launcher ends them.
    """
    launcher = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != launcher:
            return
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.write(2, f"{OURS}: ended by Ctrl-C before it served\n".encode())
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
