"""Memory of a server's scheduler process, watched from outside, for stock SGLang and our engine alike."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

from benchmarks.report import InvalidRunError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
INTERVAL_S = 0.01


def scheduler_pid(server_pid: int) -> int:
    """The process of a server that holds the model."""
    for child in psutil.Process(server_pid).children(recursive=True):
        if "scheduler" in " ".join([child.name(), *child.cmdline()]):
            return int(child.pid)
    raise InvalidRunError(f"the server {server_pid} has no scheduler process")


def resident_bytes(pid: int) -> int:
    """Physical memory of the process that belongs to it alone: anonymous pages, and each memfd of its own once.

    Resident set size would count suffix scratch once for every layer that maps it; files (the shared libraries) are left out.
    """
    _, resident, shared, *_ = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * PAGE_BYTES + sum(_memfd_bytes(pid))


def _memfd_bytes(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:sgl_prefill"):
                found.append(os.stat(link).st_blocks * 512)
        except OSError:  # closed in the meantime
            continue
    return found


class Watch:
    """Highest memory of a process above a baseline, while the block runs."""

    def __init__(self, pid: int, baseline_bytes: int) -> None:
        self.peak_bytes = 0
        self._pid, self._baseline_bytes = pid, baseline_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                grown = resident_bytes(self._pid) - self._baseline_bytes
            except (FileNotFoundError, ProcessLookupError):  # the server was stopped
                return
            self.peak_bytes = max(self.peak_bytes, grown)
