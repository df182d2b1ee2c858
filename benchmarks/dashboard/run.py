"""What does the dashboard cost: requests a second with the page open against closed, and a snapshot's time and size?

    python benchmarks/dashboard/run.py [--quick] [--json PATH]

The page is open in headless Chromium on the same cores. See the README beside this file.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import requests

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.guard.run import SERVED as GUARD
from benchmarks.guard.run import prompts as guard_prompts
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.post_recommendation.run import POSTS, SCALE
from benchmarks.post_recommendation.run import SERVED as WL1
from sgl_prefill.config import PrefillConfig
from sgl_prefill.port import dashboard
from tests.support.filled_engine import filled_engine

BROWSER = Path(__file__).with_name("browser.py")
N_TURNS, N_USERS, N_MESSAGES = 7, 20, 600
QUICK_TURNS, QUICK_USERS, QUICK_MESSAGES = 1, 3, 30
AT_LEAST = 0.98
WAITING, PREFIXES, QUICK_PREFIXES = 10_000, 50_000, 2_000
N_SNAPSHOTS, MOST_MS, MOST_BYTES = 200, 20.0, 100_000
COUNTED = {
    "requests": "wait_seconds_count",
    "cached_tokens": "cached_tokens_total",
    "kept_tokens": "kept_tokens_total",
    "evicted_tokens": "evicted_tokens_total",
}


class Workload(NamedTuple):
    """Requests that are all sent at once."""

    name: str
    served: Served
    dues: list[client.Due]


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions, quick = report.conditions(), arguments.quick
    rows, targets = of_snapshots(QUICK_PREFIXES if quick else PREFIXES)
    conditions["commands"] = {}
    n_users, n_messages = (QUICK_USERS, QUICK_MESSAGES) if quick else (N_USERS, N_MESSAGES)
    for workload in (
        Workload("WL1", WL1, traffic.post_recommendation(None, "single", SCALE, n_users=n_users, n_posts=POSTS)),
        Workload("guard", GUARD, guard_prompts(n_messages)),
    ):
        with Servers(workload.served, 1) as servers:
            server = servers.of(engines.OURS)
            conditions["commands"][workload.name] = server.command
            row = in_turns(server, workload, QUICK_TURNS if quick else N_TURNS)
            differences = against_metrics(server.url)
        rows += [row, {"workload": workload.name, "tile less /metrics": differences}]
        targets += [
            report.Target.at_least(f"{workload.name}: requests a second, page open / closed", row["ratio"], AT_LEAST),
            report.Target.at_most(
                f"{workload.name}: largest difference of a tile and /metrics", max(map(abs, differences.values())), 0
            ),
        ]
    report.finish({"conditions": conditions, "rows": rows}, targets, arguments.json)
    return 0


def of_snapshots(n_prefixes: int) -> tuple[list[dict[str, Any]], list[report.Target]]:
    """Makes snapshots of an engine with no model, ten thousand waiting requests and so many cached prefixes."""
    engine = filled_engine(
        WAITING, n_prefixes, now_s=time.perf_counter(), n_clients=1_000, config=PrefillConfig(show_prompts=True)
    )
    assert engine.state.scheduling is not None
    engine.state.scheduling.live.decide(time.perf_counter())  # who has come is put in order by the next step anyway
    gc.collect()
    gc.freeze()  # as a server does at its start
    times_ms, n_bytes = [], []
    for _ in range(N_SNAPSHOTS):
        began_s = time.perf_counter()
        made = dashboard.taken(engine.state, engine.scheduler)
        times_ms.append(1000 * (time.perf_counter() - began_s))
        n_bytes.append(len(made))
    row = {
        "waiting": WAITING,
        "prefixes": n_prefixes,
        "snapshots": N_SNAPSHOTS,
        "median_ms": statistics.median(times_ms),
        "longest_ms": max(times_ms),
        "bytes": max(n_bytes),
    }
    name = f"a snapshot of {WAITING} waiting and {n_prefixes} cached prefixes"
    return [row], [
        report.Target.at_most(f"{name}: longest, ms", row["longest_ms"], MOST_MS),
        report.Target.at_most(f"{name}: bytes", row["bytes"], MOST_BYTES),
    ]


def in_turns(server: engines.Running, workload: Workload, n_turns: int) -> dict[str, Any]:
    """Sends all with the page closed and open, n_turns times each, after one run that nothing is taken from."""
    found: dict[str, list[float]] = {"closed": [], "open": []}
    client.run(server.url, workload.dues[:50], "warm-up")
    for turn in range(n_turns):
        order = ("closed", "open") if turn % 2 == 0 else ("open", "closed")
        for page in order:
            with open_page(server.url) if page == "open" else nullcontext():
                server.flush_cache()
                outcomes = client.run(server.url, workload.dues, f"{workload.name}, {page}, turn {turn + 1}")
            found[page].append(client.figures(outcomes).requests_per_s)
    medians = {page: statistics.median(of_page) for page, of_page in found.items()}
    return {
        "workload": workload.name,
        "requests": len(workload.dues),
        "requests_per_s": medians,
        "turns_requests_per_s": found,
        "ratio": medians["open"] / medians["closed"],
    }


@contextmanager
def open_page(url: str) -> Iterator[None]:
    """Looks at the dashboard in a browser meanwhile. Raises InvalidRunError where it shows nothing."""
    command = [sys.executable, str(BROWSER), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
        assert browser.stdin is not None
        assert browser.stdout is not None
        if browser.stdout.readline().strip() != "looking":
            raise report.InvalidRunError(f"the page shows nothing: {' '.join(command)}")
        try:
            yield
        finally:
            browser.stdin.close()


def against_metrics(url: str) -> dict[str, float]:
    """Returns what the tiles show less what /metrics says, where nothing runs."""
    with requests.get(f"{url}/dashboard/events", stream=True, timeout=60) as stream:
        line = next(line for line in stream.iter_lines() if line.startswith(b"data: "))
    totals = orjson.loads(line.removeprefix(b"data: "))["engines"][0]["totals"]
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {
        tile: totals[tile]
        - sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"sglang:prefill_{name}{{"))
        for tile, name in COUNTED.items()
    }


if __name__ == "__main__":
    sys.exit(main())
