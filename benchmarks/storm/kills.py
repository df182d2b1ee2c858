"""Kills each process of a server in turn, while it idles, while its queue is full and in the middle of a step.

Each process gets SIGTERM and SIGKILL. On SIGTERM the launcher answers the waiting requests and ends with status 0. The death of
any other process, by either signal, is a failure, and every client must get an error at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

import psutil
import requests

from benchmarks import report, shapes
from benchmarks.harness import engines
from benchmarks.storm import part
from sgl_prefill.entry import local_server

PROCESSES = ("launcher", "prefork", "scheduler", "detokenizer")
IDLE, QUEUE_FULL, MID_STEP = "idle", "queue full", "mid-step"
LEFT_AFTER_S = 2
REPLY_WITHIN_S = 10
TIMEOUT_S = 60  # of what should take a moment
CLIENTS = {IDLE: (0, 0), QUEUE_FULL: (40, 6000), MID_STEP: (6, 7000)}  # how many, and tokens of each
STEP_CPU_S = 0.03  # of the scheduler: it computes by then, and a step of such a prompt takes some 0.2


class Kill(NamedTuple):
    """One kill: which process, when, and by which signal."""

    process: str
    state: str
    signal: signal.Signals

    @property
    def allowed_statuses(self) -> range:
        """Of the launcher, which alone can be asked to end."""
        if self.process != "launcher":
            return range(1, 256)
        return range(1) if self.signal == signal.SIGTERM else range(-signal.SIGKILL, -signal.SIGKILL + 1)


class Answer(NamedTuple):
    """The reply to a client."""

    at_s: float  # by time.monotonic
    what: str  # an HTTP status, "closed" or "nothing"


def measure(quick: bool) -> dict[str, Any]:
    """Kills one process of a fresh server each time; those of the scheduler, which holds the model, twice."""
    every = [Kill(*one) for one in itertools.product(PROCESSES, CLIENTS, (signal.SIGTERM, signal.SIGKILL))]
    every += [kill for kill in every if kill.process == "scheduler"]
    if quick:
        every = [Kill("launcher", QUEUE_FULL, signal.SIGTERM), Kill("scheduler", MID_STEP, signal.SIGKILL)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        flags = part.flags_in(Path(name))
        for kill in every:
            command, row = run(kill, flags, Path(name) / "log")
            rows.append(row)
            print(f"kill {len(rows)}: {row}", file=sys.stderr)
    at_most = report.Target.at_most
    targets = [
        at_most("kills: processes left after 2 s", sum(len(row["left_after_2_s"]) for row in rows), 0),
        at_most("kills: clients without an answer after 10 s", sum(row["unheard_after_10_s"] for row in rows), 0),
        at_most(
            "kills: launchers that ended otherwise than they should", sum(not row["as_it_should"] for row in rows), 0
        ),
    ]
    return report.part(rows, targets, commands={"kills": command})


def run(kill: Kill, flags: list[str], log: Path) -> tuple[str, dict[str, Any]]:
    """Starts a server, kills, and returns its command and what became of it and its clients."""
    fixed = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "PYTHONPATH": str(report.REPOSITORY), **engines.QUIET}
    server = local_server.start(engines.OURS.module, flags, log, environment=fixed)
    processes = part.processes(server.process.pid)
    with ThreadPoolExecutor(max(CLIENTS.values())[0]) as threads, ending(server, processes):
        clients = bring_into(kill.state, server.url, processes, threads)
        n_waiting = sum(not client.done() for client in clients)
        killed_s = time.monotonic()
        the(kill.process, processes).send_signal(kill.signal)
        status, left = None, processes
        with contextlib.suppress(TimeoutExpired):
            status = server.process.wait(TIMEOUT_S)
            _, left = psutil.wait_procs(processes, timeout=LEFT_AFTER_S)
        names_left = [name for process in left if (name := name_of_living(process))]
        ended_s = time.monotonic() - killed_s
        wait(clients, max(killed_s + REPLY_WITHIN_S - time.monotonic(), 0))
        answers = [client.result() for client in clients if client.done()]
    in_time = [one for one in answers if one.at_s <= killed_s + REPLY_WITHIN_S and one.what != "nothing"]
    return report.portable(server.command), {
        **kill._asdict(),
        "signal": kill.signal.name,
        "waiting": n_waiting,
        "status": status,
        "as_it_should": status in kill.allowed_statuses,
        "ended_s": round(ended_s, 2),
        "left_after_2_s": names_left,
        "answers": dict(Counter(answer.what for answer in answers)),
        "unheard_after_10_s": len(clients) - len(in_time),
        "last_heard_s": round(max((answer.at_s - killed_s for answer in in_time), default=0.0), 2),
    }


@contextlib.contextmanager
def ending(server: local_server.LocalServer, processes: list[psutil.Process]) -> Iterator[None]:
    """Ends these with the block, at once; clients that still wait hear of it by their closed connections."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait(TIMEOUT_S)


def the(name: str, processes: list[psutil.Process]) -> psutil.Process:
    """Finds a process of a server by name; the launcher comes first, and its command line is the one it was started with."""
    if name == "launcher":
        return processes[0]
    (found,) = (process for process in processes[1:] if name in process.cmdline()[0])
    return found


def bring_into(
    state: str, url: str, processes: list[psutil.Process], threads: ThreadPoolExecutor
) -> list[Future[Answer]]:
    """Returns the clients, as soon as the server is in this state."""
    scheduler = the("scheduler", processes)
    idle_s = cpu_s(scheduler)
    n_clients, n_tokens = CLIENTS[state]
    clients = [threads.submit(ask, url, number, n_tokens) for number in range(n_clients)]
    if state == QUEUE_FULL:
        wait(clients, TIMEOUT_S, return_when="FIRST_COMPLETED")
    elif state == MID_STEP:
        deadline_s = time.monotonic() + TIMEOUT_S
        while cpu_s(scheduler) < idle_s + STEP_CPU_S and time.monotonic() < deadline_s:
            time.sleep(0.002)
    if clients and all(client.done() for client in clients):
        raise report.InvalidRunError(f"{state}: no client waits, {[client.result() for client in clients][:3]}")
    return clients


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def ask(url: str, number: int, n_tokens: int) -> Answer:
    """Sends a prompt of its own. Without any reply the answer is "nothing", long after the client was counted as lost."""
    body = {"prompt": shapes.token_ids(random.Random(number), n_tokens), "allowed_token_ids": [5, 6]}
    try:
        what = str(requests.post(f"{url}/v1/completions", json=body, timeout=2 * TIMEOUT_S).status_code)
    except requests.Timeout:
        what = "nothing"
    except requests.RequestException:  # also where a connection ends within an answer
        what = "closed"
    return Answer(time.monotonic(), what)


def name_of_living(process: psutil.Process) -> str | None:
    """None where it has ended, also where its parent has not read its status yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    return None
