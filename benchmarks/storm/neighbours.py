"""What others feel of one client that does its worst, and how long one request waits behind its ten thousand."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Self

import requests

from benchmarks import report, shapes
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.storm.attack import BODIES, CONNECTIONS, FLOODS
from sgl_prefill.plan import percentile

N_TURNS, N_LIVE, LIVE_PER_S = 3, 100, 6.0
N_USERS, PREFIX_TOKENS, OWN_TOKENS = 10, 200, 50
HEAD_START_S = 2.0  # of an attack: it takes hold before others are measured
N_SINGLES = 10  # requests of another client behind ten thousand
QUIET = "quiet"
MEDIANS = ("mean_s", "p50_s", "p99_s", "health_p99_s")
# The demo model, without any flag of this package.
SERVED = Served(None, ["--context-length", "8192", "--max-total-tokens", "20000"], [*shapes.budget(3)])


def measure(quick: bool) -> dict[str, Any]:
    """Beside each flood of requests."""
    with Servers(SERVED, 1) as servers:
        server = servers.of(engines.OURS)
        rows, targets = beside(FLOODS, server, quick)
        singles = behind_ten_thousand(server, 2 if quick else N_SINGLES)
    rows.append({"beside": "10,000 prompts of one user", **singles})
    what = "one request behind 10,000 of another client: its wait in steps of the flood, P99"
    targets.append(report.Target.at_most(what, singles["steps_p99"], 3.0))
    return report.part(rows, targets, commands={"neighbours": server.command})


def measure_bodies(quick: bool) -> dict[str, Any]:
    """Beside each body that takes long for its size."""
    with Servers(SERVED, 1) as servers:
        server = servers.of(engines.OURS)
        return report.part(*beside([*BODIES, CONNECTIONS], server, quick), commands={"bodies": server.command})


def beside(
    kinds: Collection[str], server: engines.Running, quick: bool
) -> tuple[list[dict[str, Any]], list[report.Target]]:
    """Sends the same live requests in quiet and beside each attack, in turns."""
    n_turns, n_live = (1, 6) if quick else (N_TURNS, N_LIVE)
    live = live_requests(n_live)
    seconds = live[-1].at_s + 2 * HEAD_START_S
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (QUIET, *kinds)}
    for turn in range(n_turns):
        for kind, of_kind in found.items():
            server.flush_cache()
            client.run(server.url, live[:5], "warm-up")
            attacker = None if kind == QUIET else start(server.url, kind, seconds)
            with Health(server.url) as health:
                outcomes = client.run(server.url, live, f"{kind}, turn {turn + 1}")
            answered = {} if attacker is None else end(attacker)
            found_here = {"health_p99_s": health.p99_s, "attacker_was_answered": answered}
            of_kind.append({**client.figures(outcomes)._asdict(), **found_here})
    rows = []
    for kind, of_kind in found.items():
        medians = {name: statistics.median(one[name] for one in of_kind) for name in MEDIANS}
        rows.append({"beside": kind, **medians, "turns": of_kind})
    quiet, *attacked = rows
    at_most = report.Target.at_most
    targets = [
        at_most(f"others' P99 beside one client's {row['beside']} / quiet", row["p99_s"] / quiet["p99_s"], 3.0)
        for row in attacked
        if row["beside"] != CONNECTIONS  # is no body: measured, and no target
    ]
    targets += [
        at_most(f"GET /health beside one client's {row['beside']}: P99, s", row["health_p99_s"], 0.05)
        for row in attacked
        if row["beside"] in FLOODS  # a body may keep the loop for 0.2 s, which the row above shows
    ]
    return rows, targets


class Health:
    """Asks for /health ten times a second, beside the run."""

    def __init__(self, url: str) -> None:
        self._url, self._ended, self._seconds = url, threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def p99_s(self) -> float:
        return percentile(sorted(self._seconds), 99)

    def _ask(self) -> None:
        with requests.Session() as session:
            while not self._ended.wait(0.1):
                started = time.perf_counter()
                is_healthy = session.get(f"{self._url}/health", timeout=60).status_code == HTTPStatus.OK
                self._seconds.append(time.perf_counter() - started if is_healthy else math.inf)


def live_requests(n: int) -> list[client.Due]:
    """Prompts of ten users, as they come."""
    rng = random.Random("neighbours")
    prefixes = [shapes.token_ids(rng, PREFIX_TOKENS) for _ in range(N_USERS)]
    dues = []
    for at_s in traffic.poisson(LIVE_PER_S, n):
        user = rng.randrange(N_USERS)
        prompt = [*prefixes[user], *shapes.token_ids(rng, OWN_TOKENS)]
        dues.append(client.Due(at_s + HEAD_START_S, prompt, user=f"user {user}"))
    return dues


def start(url: str, kind: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.storm.attack", url, kind, str(seconds)]
    return subprocess.Popen(command, cwd=report.REPOSITORY, stdout=subprocess.PIPE, text=True)


def end(attacker: subprocess.Popen[str]) -> dict[str, int]:
    """Waits for the attacker, and returns what it was answered. Raises InvalidRunError where it failed."""
    output, _ = attacker.communicate(timeout=600)
    if attacker.returncode != 0:
        raise report.InvalidRunError(f"the attacker ended with {attacker.returncode}")
    answered: dict[str, int] = json.loads(output)
    return answered


def behind_ten_thousand(server: engines.Running, n_singles: int) -> dict[str, float]:
    """Sends one request at a time while ten thousand of another client wait. Returns each wait, in steps of that moment."""
    rng = random.Random("single")
    waits_ms, waits_steps, left = [], [], []
    attacker = None
    for number in range(n_singles):
        if attacker is None or waiting(server.url) < 2000:
            if attacker is not None:
                end(attacker)
            attacker = start(server.url, "prompts", 40.0)
            while waiting(server.url) < 5000:
                if attacker.poll() is not None:
                    raise report.InvalidRunError("the flood ended before it was there")
                time.sleep(0.1)
        body = {"input_ids": shapes.token_ids(rng, 3), "allowed_token_ids": [5, 6]}
        reply = requests.post(
            f"{server.url}/generate", json=body, headers={"x-user-id": f"single {number}"}, timeout=60
        )
        scores = reply.json()["meta_info"]["label_scores"]
        waits_ms.append(scores["queue_ms"])
        waits_steps.append(scores["queue_ms"] / scores["actual_ms"])
        left.append(waiting(server.url))
    assert attacker is not None
    attacker.terminate()
    attacker.wait()
    return {
        "singles": n_singles,
        "least_waiting": min(left),
        "queue_ms_p50": statistics.median(waits_ms),
        "queue_ms_longest": max(waits_ms),
        "steps_p50": statistics.median(waits_steps),
        "steps_p99": percentile(sorted(waits_steps), 99),
    }


def waiting(url: str) -> float:
    """Counts the requests that the policy knows of."""
    name = "sglang:prefill_waiting_requests{"
    metrics = requests.get(f"{url}/metrics", timeout=60).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name))
