"""Steady traffic of every kind over a full cache: does a process grow after the first tenth of it, and does a request fail?

Users come and go, labels are new all the time, clients leave, and some send nonsense: what a server remembers of each must be
forgotten again. Memory is anonymous memory: a page that a forked process shares with the one it was forked from counts in both,
so that writing to it changes nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import psutil

from benchmarks import process_memory, report
from benchmarks.storm import part
from benchmarks.storm.traffic import Traffic, send_all

N_REQUESTS, N_QUICK = 100_000, 300
N_SAMPLES = 100  # of memory, one after each hundredth of the requests
FIRST = 10  # samples until growth counts
AROUND = 2  # memory is the median of this many samples on either side
CONCURRENCY = 32
KV_TOKENS = 8_000  # some 70 prompts
LEAVES_S = 0.008  # at most: before it can be answered, often
TIMEOUT_S = 120
MIB = 1 << 20


class Sample(NamedTuple):
    """What one process holds."""

    bytes: int
    fds: int
    threads: int


def measure(quick: bool) -> dict[str, Any]:
    n_requests = N_QUICK if quick else N_REQUESTS
    traffic = Traffic(LEAVES_S)
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failed: list[dict[str, str]] = []
    with part.serving("--isolate-by", "user", kv_tokens=KV_TOKENS) as server:
        processes = {name_of(process): process for process in part.processes(server.pid)}
        samples: dict[str, list[Sample]] = {name: [] for name in processes}
        began_s = time.monotonic()
        for number in range(N_SAMPLES):
            block = [traffic.next() for _ in range(n_requests // N_SAMPLES)]
            for answer in asyncio.run(send_all(server.url, block, CONCURRENCY, TIMEOUT_S)):
                statuses[answer.request.kind][answer.status] += 1
                if not answer.is_allowed:
                    failed.append(answer.failure)
            for name, process in processes.items():
                samples[name].append(sample(process))
            held = {name: f"{of_process[-1].bytes / MIB:.0f}" for name, of_process in samples.items()}
            print(f"\rsoak: block {number + 1} of {N_SAMPLES}, MiB {held}    ", end="", file=sys.stderr)
        elapsed_s = time.monotonic() - began_s
    rows = [row_of(name, of_process) for name, of_process in samples.items()]
    n_first = FIRST * n_requests // N_SAMPLES
    targets = [
        report.Target.at_most(
            f"steady traffic: largest growth of a process after the first {n_first:,} requests",
            max(row["growth"] for row in rows),
            0.02,
        ),
        report.Target.at_most("steady traffic: requests that failed", len(failed), 0),
    ]
    rows.append({"requests": n_requests, "requests_per_s": round(n_requests / elapsed_s), "statuses": statuses})
    return report.part([*rows, *failed[:20]], targets, commands={"soak": server.command})


def row_of(name: str, samples: list[Sample]) -> dict[str, Any]:
    """Says how much a process has grown, in the second half too (a leak goes on, a fragmented heap does not), and all samples."""
    middle, last = len(samples) // 2, len(samples) - AROUND
    moments = [samples[max(at - 1 - AROUND, 0) : at + AROUND] for at in (FIRST, middle, last)]
    early_bytes, middle_bytes, late_bytes = (statistics.median(one.bytes for one in some) for some in moments)
    return {
        "process": name,
        "mib": [round(early_bytes / MIB, 1), round(late_bytes / MIB, 1)],
        "growth": round(late_bytes / early_bytes - 1, 4),
        "growth_in_second_half": round(late_bytes / middle_bytes - 1, 4),
        "fds": [max(one.fds for one in some) for some in (moments[0], moments[-1])],
        "threads": [max(one.threads for one in some) for some in (moments[0], moments[-1])],
        "mib_of_all_samples": [round(one.bytes / MIB, 1) for one in samples],
    }


def name_of(process: psutil.Process) -> str:
    """Names a process by the title it has set; the launcher by its module."""
    words: list[str] = [word for word in process.cmdline() if word]
    if len(words) == 1:
        return words[0].rpartition("::")[2]
    return "launcher" if "sgl_prefill.launch_server" in words else "resource tracker"


def sample(process: psutil.Process) -> Sample:
    """Raises InvalidRunError where the process has ended."""
    try:
        return Sample(process_memory.resident_bytes(process.pid), process.num_fds(), process.num_threads())
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise report.InvalidRunError(f"a process of the server has ended: {error}") from error
