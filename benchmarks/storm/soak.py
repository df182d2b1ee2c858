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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks import process_memory, report
from benchmarks.harness import engines
from benchmarks.storm import part
from benchmarks.storm.traffic import Request, Traffic

N_REQUESTS, N_QUICK = 100_000, 300
N_SAMPLES = 100  # of memory, one after each hundredth of the requests
FIRST = 10  # samples until growth counts
AROUND = 2  # memory is the median of this many samples on either side
CONCURRENCY = 32
KV_TOKENS = 8_000  # some 70 prompts
CANCEL_AFTER_S = 0.008  # at most: before it can be answered, often
TIMEOUT_S = 120
MIB = 1 << 20


class Sample(NamedTuple):
    """What one process holds."""

    bytes: int
    fds: int
    threads: int


def measure(quick: bool, model: Path, folder: Path) -> part.Part:
    """Sends all requests to one server. folder: for its log."""
    return run(N_QUICK if quick else N_REQUESTS, N_SAMPLES, FIRST, model, folder / "soak.txt")


def run(n_requests: int, n_samples: int, first: int, model: Path, log: Path) -> part.Part:
    """Sends the requests in one block for each sample, and compares the last samples with those around `first`."""
    traffic = Traffic(model, CANCEL_AFTER_S)
    with part.serving(model, log, "--isolate-by", "user", kv_tokens=KV_TOKENS) as server:
        began_s = time.monotonic()
        samples, statuses, failed = asyncio.run(send_all(server, traffic, n_requests // n_samples, n_samples))
        elapsed_s = time.monotonic() - began_s
    rows = [row_of(name, of_process, first) for name, of_process in samples.items()]
    rows.append({"requests": n_requests, "requests_per_s": round(n_requests / elapsed_s), "statuses": statuses})
    growth = max(row["growth"] for row in rows if "growth" in row)
    n_first = first * n_requests // n_samples
    targets = [
        report.Target.at_most(
            f"steady traffic: largest growth of a process after the first {n_first:,} requests", growth, 0.02
        ),
        report.Target.at_most("steady traffic: requests that failed", len(failed), 0),
    ]
    rows += [{"failed": one} for one in failed[:20]]
    return part.Part(rows, targets, {"soak": server.command})


def row_of(name: str, samples: list[Sample], first: int) -> dict[str, Any]:
    """Says how much a process has grown, in the second half too (a leak goes on, a fragmented heap does not), and all samples."""
    middle, last = len(samples) // 2, len(samples) - AROUND
    moments = [samples[max(at - 1 - AROUND, 0) : at + AROUND] for at in (first, middle, last)]
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


async def send_all(
    server: engines.Running, traffic: Traffic, n_block: int, n_blocks: int
) -> tuple[dict[str, list[Sample]], dict[str, dict[str, int]], list[str]]:
    """Returns samples of each process, how often each kind of request got which status, and what failed."""
    processes = {name_of(process): process for process in part.processes(server.pid)}
    samples: dict[str, list[Sample]] = {name: [] for name in processes}
    statuses: dict[str, Counter[str]] = {}
    failed: list[str] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # see benchmarks.harness.client
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for number in range(n_blocks):
            requests = iter([traffic.next() for _ in range(n_block)])
            workers = (work(session, server.url, requests, statuses, failed) for _ in range(CONCURRENCY))
            await asyncio.gather(*workers)
            for name, process in processes.items():
                samples[name].append(sample(process))
            left = {name: f"{of_process[-1].bytes / MIB:.0f}" for name, of_process in samples.items()}
            print(f"\rsoak: block {number + 1} of {n_blocks}, MiB {left}    ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return samples, {kind: dict(of_kind) for kind, of_kind in sorted(statuses.items())}, failed


async def work(
    session: aiohttp.ClientSession,
    url: str,
    requests: Iterator[Request],
    statuses: dict[str, Counter[str]],
    failed: list[str],
) -> None:
    """Sends one request after another, until there is none."""
    for request in requests:
        leaves_after_s = request.leaves_after_s
        limit = session.timeout if leaves_after_s is None else aiohttp.ClientTimeout(total=leaves_after_s)
        to: dict[str, Any] = {"data": request.sent, "headers": request.headers, "timeout": limit}
        try:
            async with session.post(url + request.path, **to) as reply:
                raw, got = await reply.read(), str(reply.status)
        except TimeoutError:
            raw, got = b"", "nothing" if leaves_after_s is None else "cancelled"
        except aiohttp.ClientError as error:
            raw, got = repr(error).encode(), "closed"
        statuses.setdefault(request.kind, Counter())[got] += 1
        if got not in map(str, request.statuses) and got != "cancelled":
            failed.append(f"{request.kind}: {got} {raw[:300]!r} to {request.sent[:300]!r}")


def name_of(process: psutil.Process) -> str:
    """Names a process by the title it has set; the launcher by its module."""
    words: list[str] = [word for word in process.cmdline() if word]
    if len(words) == 1:
        return words[0].rpartition("::")[2]
    return "launcher" if "sgl_prefill.launch_server" in words else "resource tracker"


def sample(process: psutil.Process) -> Sample:
    """Raises InvalidRunError where the process has ended: the server's log says why."""
    try:
        return Sample(process_memory.resident_bytes(process.pid), process.num_fds(), process.num_threads())
    except (FileNotFoundError, psutil.NoSuchProcess) as error:
        raise report.InvalidRunError(f"a process of the server has ended: {error}") from error
