"""Two engines of one core each behind SGLang's gateway, as `sgl_prefill.cluster` starts it."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
import orjson
import psutil
import requests

from benchmarks import report, shapes
from benchmarks.harness import client, traffic
from benchmarks.harness.engines import OURS, QUIET
from benchmarks.load.wl1 import POSTS, SCALE
from benchmarks.load.wl1 import SERVED as WL1
from sgl_prefill.cluster import __main__ as cluster
from sgl_prefill.entry import local_server
from sgl_prefill.plan import percentile
from sgl_prefill.planner.workloads import Arrival, ceiling_of_saving

N_ENGINES = 2
USERS, QUICK_USERS = 40, 4
ROUTINGS = ("user", "round_robin", "cache_aware", "prefix_hash", "power_of_two")
AGAIN = "user, again"  # an identical run
N_TURNS, N_BURST_TURNS = 3, 1
POST_TOKENS, PROFILE_TOKENS = 150 // SCALE, 14_000 // SCALE
HEAVY = "heavy"
HEAVY_NAMES = 4
SHORT_TOKENS = 40
N_LATENCIES, N_THROUGHPUT, N_COST_TURNS = 300, 800, 5
CONNECTIONS = 32
KILL_REQUESTS, KILL_CONNECTIONS = 600, 24
READY_S = 120
LEFT_AFTER_S = 2


class Part(NamedTuple):
    """What one part has found."""

    rows: Any  # JSON
    targets: list[report.Target]


class Engines:
    """The engines, which start on first use and stay up, and gateways before them. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flags: list[str] = []
        self._running: list[local_server.LocalServer] = []
        self.commands: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._running:
            server.stop()

    @property
    def running(self) -> list[local_server.LocalServer]:
        if not self._running:
            self._flags = [*WL1.model_flags(self._folder), *WL1.flags(OURS)]
        for index in range(len(self._running), N_ENGINES):
            self._running.append(self.start(self._flags, index, None))
            self.commands[f"engine {index}"] = report.portable(self._running[-1].command)
        return self._running

    def start(self, flags: Sequence[str], index: int, port: int | None) -> local_server.LocalServer:
        environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "PYTHONPATH": str(report.REPOSITORY), **QUIET}
        log = self._folder / f"engine-{index}-{time.monotonic_ns()}.log"
        server = local_server.begin(OURS.module, flags, log, port=port, environment=environment)
        local_server.await_health(server)
        if "sgl_prefill" not in requests.get(f"{server.url}/server_info", timeout=60).json():
            raise report.InvalidRunError(f"engine {index} is not ours")
        return server

    def restart(self, index: int) -> None:
        """Starts an engine that has died where it was."""
        port = int(self.running[index].url.rpartition(":")[2])
        self.running[index] = self.start(self._flags, index, port)

    def flush(self) -> None:
        for server in self.running:
            requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()

    @contextmanager
    def behind(self, routing: str, n_engines: int = N_ENGINES) -> Iterator[str]:
        """The URL of a gateway before the first engines, their caches empty and its tables too."""
        self.flush()
        port, metrics_port = local_server.free_port(), local_server.free_port()
        urls = [server.url for server in self.running[:n_engines]]
        command = cluster.gateway_command(urls, routing, "127.0.0.1", port, metrics_port, 5, None)
        self.commands[f"gateway, {routing}"] = report.portable(command)
        process = local_server.spawn(command, self._folder / "gateway.log")
        url = f"http://127.0.0.1:{port}"
        try:
            await_ready(url, n_engines)
            yield url
        finally:
            process.terminate()
            process.wait()


def await_ready(url: str, n_engines: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while cluster.n_ready(url) < n_engines:
        if time.monotonic() > deadline_s:
            raise report.InvalidRunError(f"{url} does not see {n_engines} engines")
        time.sleep(0.2)


def routing(engines: Engines, quick: bool) -> Part:
    """WL1 all at once and as bursts of users, each routing of the gateway taking turns."""
    n_users, n_turns = (QUICK_USERS, 1) if quick else (USERS, N_TURNS)
    at_once = traffic.post_recommendation(None, "single", SCALE, n_users=n_users, n_posts=POSTS, names_users=True)
    ceiling = ceiling_of(at_once)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    burst_rate = None
    for turn in range(n_turns):
        for name in (*ROUTINGS, AGAIN):
            kind = name.partition(",")[0]
            row = asked(engines, kind, at_once, f"at once, {name}, turn {turn + 1}")
            found.setdefault(("at once", name), []).append(row)
            if burst_rate is None:
                burst_rate = row["requests_per_s"]
            if turn >= N_BURST_TURNS:
                continue
            bursts = traffic.post_recommendation(
                0.8 * burst_rate, "burst", SCALE, n_users=n_users, n_posts=POSTS, names_users=True
            )
            row = asked(engines, kind, bursts, f"bursts, {name}, turn {turn + 1}")
            found.setdefault(("bursts", name), []).append(row)
    rows = [
        {"arrivals": arrivals, "routing": name, "ceiling": ceiling, "turns": of_turns, **medians(of_turns)}
        for (arrivals, name), of_turns in found.items()
    ]
    of: dict[tuple[str, str], dict[str, Any]] = {
        (arrivals, name): row for (arrivals, name), row in zip(found, rows, strict=True)
    }
    by_user, in_turn = of["at once", "user"], of["at once", "round_robin"]
    targets = [
        report.Target.at_least(
            "WL1 over 2 engines, by user: tokens cached / ceiling", by_user["cached_share"] / ceiling, 0.95
        ),
        report.Target.at_least(
            "WL1 over 2 engines, all at once: requests a second, by user / round robin",
            by_user["requests_per_s"] / in_turn["requests_per_s"],
            1.5,
        ),
    ]
    return Part(rows, targets)


def ceiling_of(dues: Sequence[client.Due]) -> float:
    """The share of all tokens that one unlimited cache would save."""
    return ceiling_of_saving(
        [Arrival(due.at_s, due.user, len(due.input_ids) - POST_TOKENS, POST_TOKENS) for due in dues]
    )


def asked(engines: Engines, routing: str, dues: Sequence[client.Due], name: str) -> dict[str, Any]:
    """One run through a fresh gateway."""
    with engines.behind(routing) as url:
        outcomes = client.run(url, dues, name)
        answered = [n_answered_of(server.url) for server in engines.running]
    return {**client.figures(outcomes)._asdict(), "requests_of_engines": answered}


def n_answered_of(url: str) -> float:
    """Requests that an engine has answered since it started."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    name = "sglang:num_requests_total"
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((name + "{", name + " "))
    )


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("requests_per_s", "cached_share", "mean_s", "p50_s", "p99_s")
    return {name: statistics.median(turn[name] for turn in turns) for name in names}


def heavy_user(engines: Engines, quick: bool) -> Part:
    """Half of all requests are one user's: by user, by user with that one under several names, and round robin. How long
    the others wait, and what all together get."""
    n_users, n_turns = (QUICK_USERS, 1) if quick else (USERS // 2, N_TURNS)
    rng = random.Random(0)
    others = [f"user-{number}" for number in range(n_users) for _ in range(POSTS)]
    names = [*others, *([HEAVY] * len(others))]
    rng.shuffle(names)
    capacity = None
    found: dict[str, list[dict[str, Any]]] = {}
    ways = {"by user": "user", "by user, the heavy one under 4 names": "user", "round robin": "round_robin"}
    for turn in range(n_turns):
        for way, kind in ways.items():
            if capacity is None:
                capacity = asked(engines, "user", heavy_dues(names, None, 1), "heavy user, what two engines serve")
            n_names = HEAVY_NAMES if "names" in way else 1
            dues = heavy_dues(names, 0.7 * capacity["requests_per_s"], n_names)
            with engines.behind(kind) as url:
                outcomes = client.run(url, dues, f"{way}, turn {turn + 1}")
            is_heavy = [due.user.startswith(HEAVY) for due in dues]
            of_others = [one.latency_s for one, heavy in zip(outcomes, is_heavy, strict=True) if not heavy]
            of_heavy = [one.latency_s for one, heavy in zip(outcomes, is_heavy, strict=True) if heavy]
            row = {
                **client.figures(outcomes)._asdict(),
                "others_p50_s": percentile(sorted(of_others), 50),
                "others_p99_s": percentile(sorted(of_others), 99),
                "heavy_p50_s": percentile(sorted(of_heavy), 50),
                "heavy_p99_s": percentile(sorted(of_heavy), 99),
            }
            found.setdefault(way, []).append(row)
    columns = ("others_p50_s", "others_p99_s", "heavy_p50_s", "heavy_p99_s")
    rows = [
        {
            "way": way,
            "turns": of_turns,
            **medians(of_turns),
            **{name: statistics.median(turn[name] for turn in of_turns) for name in columns},
        }
        for way, of_turns in found.items()
    ]
    return Part(rows, [])


def heavy_dues(users: Sequence[str], requests_per_s: float | None, n_names: int) -> list[client.Due]:
    """Each user's requests share a profile; the heavy one's share a profile a name, as if it were that of a shop's branch."""
    times_s = traffic.poisson(requests_per_s, len(users))
    count: Counter[str] = Counter()
    arrivals = []
    for at_s, user in zip(times_s, users, strict=True):
        count[user] += 1
        name = f"{HEAVY}-{count[user] % n_names}" if user == HEAVY else user
        arrivals.append(Arrival(at_s, name, PROFILE_TOKENS, POST_TOKENS))
    return traffic.with_tokens(arrivals, names_users=True)


def gateway_cost(engines: Engines, quick: bool) -> Part:
    """One engine, asked directly and through the gateway in turns: short requests, one at a time, and many at once."""
    n_latencies, n_throughput, n_turns = (20, 60, 1) if quick else (N_LATENCIES, N_THROUGHPUT, N_COST_TURNS)
    rows: list[dict[str, Any]] = []
    with engines.behind("user", 1) as through:
        urls = {
            "direct": engines.running[0].url,
            "through the gateway": through,
            "direct, again": engines.running[0].url,
        }
        for turn in range(n_turns):
            for way, url in urls.items():
                latencies = asyncio.run(one_at_a_time(url, n_latencies))
                per_s = asyncio.run(many_at_once(url, n_throughput))
                rows.append(
                    {
                        "way": way,
                        "turn": turn,
                        "p50_ms": percentile(latencies, 50),
                        "p99_ms": percentile(latencies, 99),
                        "requests_per_s": per_s,
                    }
                )

    def median(way: str, column: str) -> float:
        return float(statistics.median(row[column] for row in rows if row["way"] == way))

    def added(column: str) -> float:
        return median("through the gateway", column) - median("direct", column)

    targets = [
        report.Target.at_most("the gateway's own cost: latency added, P50, ms", added("p50_ms"), 2),
        report.Target.at_most("the gateway's own cost: latency added, P99, ms", added("p99_ms"), 10),
        report.Target.at_least(
            "requests a second, through the gateway / direct",
            median("through the gateway", "requests_per_s") / median("direct", "requests_per_s"),
            0.95,
        ),
    ]
    return Part(rows, targets)


def short_body(number: int) -> bytes:
    ids = shapes.token_ids(random.Random(number), SHORT_TOKENS)
    return orjson.dumps(client.body_of(client.Due(0.0, ids)))


async def one_at_a_time(url: str, n_requests: int) -> list[float]:
    """Returns sorted latencies in ms."""
    headers = {"content-type": "application/json", "x-user-id": "ann"}
    found = []
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in range(n_requests):
            started = time.perf_counter()
            await post(session, url, short_body(number))
            found.append(1000 * (time.perf_counter() - started))
    return sorted(found)


async def many_at_once(url: str, n_requests: int) -> float:
    """Returns requests a second over connections that each send one request after the other."""
    headers = {"content-type": "application/json", "x-user-id": "ann"}
    bodies = iter([short_body(number) for number in range(n_requests)])
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> None:
            for body in bodies:
                await post(session, url, body)

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
        return n_requests / (time.perf_counter() - started)


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    async with session.post(f"{url}/generate", data=body) as reply:
        raw = await reply.read()
        if reply.status != 200:
            raise report.InvalidRunError(f"a request failed with {reply.status}: {raw[:300]!r}")


def kills(engines: Engines, quick: bool) -> Part:
    """Each engine in turn dies of SIGKILL under load and is started again: what became of every request."""
    n_requests = 100 if quick else KILL_REQUESTS
    rows: list[dict[str, Any]] = []
    for index in range(1 if quick else N_ENGINES):
        with engines.behind("user") as url, ThreadPoolExecutor(KILL_CONNECTIONS) as pool:
            asked = [pool.submit(ask_once, url, number) for number in range(n_requests)]
            while sum(one.done() for one in asked) < n_requests // 4:
                time.sleep(0.01)
            victim = engines.running[index]
            family = psutil.Process(victim.process.pid).children(recursive=True)
            victim.process.kill()
            victim.process.wait()
            _, left = psutil.wait_procs(family, timeout=LEFT_AFTER_S)
            answers = [one.result() for one in asked]
            after = [ask_once(url, -number) for number in range(1, 25)]
            engines.restart(index)
            await_ready(url, N_ENGINES)
            back = [ask_once(url, -number) for number in range(1, 25)]
        rows.append(
            {
                "engine": index,
                "requests": n_requests,
                "answers": dict(Counter(answers)),
                "after_the_death": dict(Counter(after)),
                "after_the_return": dict(Counter(back)),
                "processes_left": len(left),
                "lost": answers.count("nothing"),
            }
        )
        print(rows[-1], file=sys.stderr)
    lost = sum(row["lost"] for row in rows)
    refused = sum(row["after_the_return"].get("200", 0) != 24 for row in rows)
    return Part(
        rows,
        [
            report.Target.at_most("kills of an engine under load: requests lost without an error", lost, 0),
            report.Target.at_most("kills: engines that are not used again when they are back", refused, 0),
        ],
    )


def ask_once(url: str, number: int) -> str:
    """Returns the status of a label request; an error without a message counts as nothing."""
    body: dict[str, Any] = {
        "model": "default",
        "prompt": shapes.token_ids(random.Random(number), PROFILE_TOKENS // 4),
        "allowed_token_ids": [100, 200],
    }
    try:
        reply = requests.post(
            f"{url}/v1/completions", json=body, headers={"x-user-id": f"user-{number % 12}"}, timeout=120
        )
        told = reply.json()
    except (requests.RequestException, ValueError):
        return "nothing"
    if reply.status_code == 200:
        return "200" if told["choices"][0]["label_scores"]["labels"] else "nothing"
    return (
        f"{reply.status_code}, {told['error'].get('code') or told['error']['type']}" if told.get("error") else "nothing"
    )
