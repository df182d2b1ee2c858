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
STATES = (IDLE, QUEUE_FULL, MID_STEP)
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
LEFT_AFTER_S = 2
REPLY_WITHIN_S = 10
END_S = 60  # a launcher that lives on for longer does not end
CLIENT_TIMEOUT_S = 120  # far more than is waited for here
STATE_TIMEOUT_S = 60
FULL_CLIENTS, FULL_TOKENS = 40, 6000
STEP_CLIENTS, STEP_TOKENS = 6, 7000  # one is computed, the others wait
STEP_CPU_S = 0.03  # of the scheduler: it computes by then, and a step of such a prompt takes some 0.2


class Kill(NamedTuple):
    """One kill: which process, when, and by which signal."""

    process: str
    state: str
    signal: signal.Signals


class Answer(NamedTuple):
    """The reply to a client."""

    at_s: float  # by time.monotonic
    what: str  # an HTTP status, or "closed"


def measure(quick: bool, model: Path, folder: Path) -> part.Part:
    """Kills one process of a fresh server each time. folder: for the logs of the servers."""
    rows: list[dict[str, Any]] = []
    command = ""
    for number, kill in enumerate(kills(quick)):
        command, row = run(kill, model, folder / f"kill-{number}.txt")
        rows.append(row)
        print(f"kill {number}: {row}", file=sys.stderr)
    return part.Part(rows, targets(rows), {"kills": command})


def kills(quick: bool) -> list[Kill]:
    """Returns every combination once, and those of the scheduler, which holds the model, twice."""
    if quick:
        return [Kill("launcher", QUEUE_FULL, signal.SIGTERM), Kill("scheduler", MID_STEP, signal.SIGKILL)]
    every = [Kill(*one) for one in itertools.product(PROCESSES, STATES, SIGNALS)]
    return [*every, *(kill for kill in every if kill.process == "scheduler")]


def targets(rows: list[dict[str, Any]]) -> list[report.Target]:
    left = sum(row["left_after_2_s"] for row in rows)
    unanswered = sum(row["unheard_after_10_s"] for row in rows)
    otherwise = sum(row["outcome"] != row["expected"] for row in rows)
    return [
        report.Target.at_most("kills: processes left after 2 s", left, 0),
        report.Target.at_most("kills: clients without an answer after 10 s", unanswered, 0),
        report.Target.at_most("kills: launchers that ended otherwise than they should", otherwise, 0),
    ]


def run(kill: Kill, model: Path, log: Path) -> tuple[str, dict[str, Any]]:
    """Starts a server, kills, and returns its command and what became of it and its clients."""
    flags = part.flags_of(model)
    fixed = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "PYTHONPATH": str(report.REPOSITORY), **engines.QUIET}
    server = local_server.start(engines.OURS.module, flags, log, environment=fixed)
    processes = part.processes(server.process.pid)
    try:
        with ThreadPoolExecutor(max(FULL_CLIENTS, STEP_CLIENTS)) as threads, ending(processes):
            clients = bring_into(kill.state, server, processes, threads)
            n_waiting = sum(not client.done() for client in clients)
            killed_s = time.monotonic()
            the(kill.process, processes).send_signal(kill.signal)
            row = look_at(kill, server, processes, clients, killed_s)
    finally:
        server.process.wait(END_S)
    row["waiting"] = n_waiting
    return report.portable(server.command), row


@contextlib.contextmanager
def ending(processes: list[psutil.Process]) -> Iterator[None]:
    """Ends these with the block, at once; clients that still wait hear of it by their closed connections."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def the(name: str, processes: list[psutil.Process]) -> psutil.Process:
    """Finds a process of a server by name; the launcher comes first, and its command line is the one it was started with."""
    if name == "launcher":
        return processes[0]
    found = [process for process in processes[1:] if name in process.cmdline()[0]]
    if len(found) != 1:
        raise report.InvalidRunError(f"the server has {len(found)} processes that are its {name}")
    return found[0]


def bring_into(
    state: str, server: local_server.LocalServer, processes: list[psutil.Process], threads: ThreadPoolExecutor
) -> list[Future[Answer]]:
    """Returns the clients, as soon as the server is in this state."""
    if state == IDLE:
        return []
    if state == QUEUE_FULL:
        clients = [threads.submit(ask, server.url, number, FULL_TOKENS) for number in range(FULL_CLIENTS)]
        wait(clients, STATE_TIMEOUT_S, return_when="FIRST_COMPLETED")
    else:
        scheduler = the("scheduler", processes)
        idle_s = cpu_s(scheduler)
        clients = [threads.submit(ask, server.url, number, STEP_TOKENS) for number in range(STEP_CLIENTS)]
        deadline_s = time.monotonic() + STATE_TIMEOUT_S
        while cpu_s(scheduler) < idle_s + STEP_CPU_S and time.monotonic() < deadline_s:
            time.sleep(0.002)
    if all(client.done() for client in clients):
        raise report.InvalidRunError(f"{state}: no client waits, {[client.result() for client in clients][:3]}")
    return clients


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def ask(url: str, number: int, n_tokens: int) -> Answer:
    """Sends a prompt of its own. Without any reply the answer is "nothing", long after the client was counted as lost."""
    prompt = shapes.token_ids(random.Random(number), n_tokens)
    body: dict[str, Any] = {"model": "default", "prompt": prompt, "allowed_token_ids": [5, 6]}
    try:
        what = str(requests.post(f"{url}/v1/completions", json=body, timeout=CLIENT_TIMEOUT_S).status_code)
    except requests.Timeout:
        what = "nothing"
    except requests.RequestException:  # also where a connection ends within an answer
        what = "closed"
    return Answer(time.monotonic(), what)


def look_at(
    kill: Kill,
    server: local_server.LocalServer,
    processes: list[psutil.Process],
    clients: list[Future[Answer]],
    killed_s: float,
) -> dict[str, Any]:
    """Says what became of the server and its clients."""
    status, ended_s, left = None, None, list[psutil.Process]()
    try:
        status = server.process.wait(END_S)
    except TimeoutExpired:
        outcome = "serves" if serves(server.url) else "neither ends nor serves"
    else:
        ended_s, outcome = time.monotonic() - killed_s, f"ends with {'failure' if status > 0 else status}"
        _, alive = psutil.wait_procs(processes, timeout=LEFT_AFTER_S)
        left = list(filter(holds_memory, alive))
    wait(clients, max(killed_s + REPLY_WITHIN_S - time.monotonic(), 0))
    answers = [client.result() for client in clients if client.done()]
    in_time = [answer for answer in answers if answer.at_s <= killed_s + REPLY_WITHIN_S and answer.what != "nothing"]
    return {
        "process": kill.process,
        "state": kill.state,
        "signal": kill.signal.name,
        "outcome": outcome,
        "expected": expected(kill),
        "status": status,
        "ended_s": None if ended_s is None else round(ended_s, 2),
        "left_after_2_s": len(left),
        "left": [process_name(process) for process in left],
        "answers": dict(Counter(answer.what for answer in answers)),
        "unheard_after_10_s": len(clients) - len(in_time),
        "last_heard_s": round(max((answer.at_s - killed_s for answer in in_time), default=0.0), 2),
    }


def expected(kill: Kill) -> str:
    """Says what a server has to do: only its launcher can be asked to end."""
    if kill.process != "launcher":
        return "ends with failure"
    return "ends with 0" if kill.signal == signal.SIGTERM else f"ends with {-signal.SIGKILL}"


def serves(url: str) -> bool:
    return ask(url, -1, 10).what == "200"


def holds_memory(process: psutil.Process) -> bool:
    """Says whether a process lives: one that has ended may wait for a parent that reads its status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def process_name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return "ended just now"
