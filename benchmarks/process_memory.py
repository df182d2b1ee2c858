"""Memory of a server's scheduler process, watched from outside, for stock SGLang and our engine alike."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from benchmarks.report import InvalidRunError
from sgl_prefill.startup.device import PeakWatch, anonymous_bytes

INTERVAL_S = 0.01


def scheduler_pid(server_pid: int) -> int:
    """The process of a server that holds the model; vLLM calls it a worker."""
    for child in psutil.Process(server_pid).children(recursive=True):
        title = " ".join([child.name(), *child.cmdline()])
        if "scheduler" in title or "VLLM::Worker" in title:
            return int(child.pid)
    raise InvalidRunError(f"the server {server_pid} has no scheduler process")


def resident_bytes(pid: int) -> int:
    """Physical memory of the process that belongs to it alone: anonymous pages, and each memfd of its own once.

    Resident set size would count suffix scratch once for every layer that maps it; files (the shared libraries) are left out.
    """
    return anonymous_bytes(pid) + sum(_memfd_bytes(pid))


def _memfd_bytes(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:sgl_prefill"):
                found.append(os.stat(link).st_blocks * 512)
        except OSError:  # closed in the meantime
            continue
    return found


def watch(pid: int, baseline_bytes: int) -> PeakWatch:
    """Highest memory of a process above a baseline, while the block runs."""
    return PeakWatch(lambda: resident_bytes(pid), baseline_bytes, INTERVAL_S)
