"""Resident memory of a process on Linux, and its highest growth over a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process that is backed by no file and shared with nobody."""
    _, resident, shared, *_ = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class PeakWatch:
    """Highest value of `read()` above `baseline_bytes` while the block runs, looked at every `interval_s` by a thread.

    Ends early where the process that is read has gone.
    """

    def __init__(self, read: Callable[[], int], baseline_bytes: int, interval_s: float) -> None:
        self.peak_bytes = 0
        self._read, self._baseline_bytes, self._interval_s = read, baseline_bytes, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                grown = self._read() - self._baseline_bytes
            except (FileNotFoundError, ProcessLookupError):
                return
            self.peak_bytes = max(self.peak_bytes, grown)
