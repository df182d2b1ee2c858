"""`--decision-log`: lines appended to a file, each by one write to the page cache. What does not fit a disk is counted, and no
reason to stop."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable

from sgl_prefill.errors import ConfigurationError

logger = logging.getLogger(__name__)


class DecisionLog:
    """A file that this process alone appends to. Raises ConfigurationError where it cannot.

    Args:
        on_lost: is called for each line that could not be written.
    """

    def __init__(self, path: str, on_lost: Callable[[], None] = lambda: None) -> None:
        self._path, self._on_lost = path, on_lost
        self.n_lost = 0
        self._was_told = False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"--decision-log {path} cannot be written ({error.strerror}): give a file in a folder that is there and is yours"
            ) from error
        try:
            self._check()
            self._end_torn_line()
        except ConfigurationError:
            os.close(self._file)
            raise

    def _check(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ConfigurationError(f"--decision-log {self._path} is no file: name one, or a new one")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"--decision-log {self._path} is written by another server: give each server a file of its own"
            ) from error
        except OSError as error:  # of a file system that knows no locks
            raise ConfigurationError(
                f"--decision-log {self._path} cannot be locked ({error.strerror}), and another server could write it too: give a"
                " file on a disk of this machine"
            ) from error

    def _end_torn_line(self) -> None:
        """Begins on a line of its own, whatever a machine that stopped has left."""
        size = os.fstat(self._file).st_size
        if not size or os.pread(self._file, 1, size - 1) == b"\n":
            return
        try:
            self._append(b"\n")
        except OSError as error:
            raise ConfigurationError(
                f"--decision-log {self._path} ends in half a line, behind which nothing can be written ({error.strerror}): make"
                " room on its disk, or give another file"
            ) from error

    def write(self, line: bytes) -> None:
        """Appends a line, whole or not at all."""
        try:
            self._append(line + b"\n")
        except OSError as error:
            self.n_lost += 1
            self._on_lost()
            if not self._was_told:
                self._was_told = True
                logger.error(
                    "--decision-log %s: a decision could not be written (%s), and is missing there. Requests are served as"
                    " before. Further ones are counted (sglang:prefill_lost_decision_lines_total) and not logged",
                    self._path,
                    error.strerror,
                )

    def _append(self, content: bytes) -> None:
        """Raises OSError, after which nothing of it is there."""
        if os.fstat(self._file).st_nlink == 0:
            raise OSError(errno.ENOENT, "its file was deleted; a new one begins with the next start")
        n_written = 0
        try:
            while n_written < len(content):  # what is cut off at the end of a disk ends in an error that says why
                n_written += os.write(self._file, content[n_written:])
        except OSError:
            if n_written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - n_written)
            raise

    def close(self) -> None:
        os.close(self._file)
