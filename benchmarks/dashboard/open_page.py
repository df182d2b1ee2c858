"""How many requests a second are lost while a browser on the same cores shows the page, and does it show what /metrics says?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import requests

from benchmarks import report
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.load.wl1 import POSTS, SCALE
from benchmarks.load.wl1 import SERVED as WL1
from benchmarks.rivals.workloads import GUARD
from benchmarks.rivals.workloads import guard as guard_prompts

BROWSER = Path(__file__).with_name("browser.py")
N_USERS, N_MESSAGES = 100, 600
QUICK_TURNS, QUICK_USERS, QUICK_MESSAGES = 1, 3, 30
AT_LEAST = 0.98
COUNTED = {
    "requests": "wait_seconds_count",
    "cached": "cached_tokens_total",
    "kept": "kept_tokens_total",
    "evicted": "evicted_tokens_total",
}


class Workload(NamedTuple):
    """Requests that are all sent at once."""

    name: str
    served: Served
    dues: list[client.Due]
    n_turns: int  # a run of WL1 differs from the next one by 4 %, since what is evicted hangs on when requests come


def measure(quick: bool = False) -> dict[str, Any]:
    """Serves each workload with the page closed and open, in turns."""
    n_users, n_messages = (QUICK_USERS, QUICK_MESSAGES) if quick else (N_USERS, N_MESSAGES)
    rows: list[dict[str, Any]] = []
    targets: list[report.Target] = []
    commands: dict[str, str] = {}
    for workload in (
        Workload("WL1", WL1, traffic.post_recommendation(None, "single", SCALE, n_users=n_users, n_posts=POSTS), 21),
        Workload("guard", GUARD, guard_prompts(n_messages), 9),
    ):
        with Servers(workload.served, 1) as servers:
            server = servers.of(engines.OURS)
            commands[workload.name] = server.command
            row = in_turns(server, workload, QUICK_TURNS if quick else workload.n_turns)
            row["tile less /metrics"] = against_metrics(server.url)
        rows.append(row)
        largest = max(map(abs, row["tile less /metrics"].values()))
        targets += [
            report.Target.at_least(f"{workload.name}: requests a second, page open / closed", row["ratio"], AT_LEAST),
            report.Target.at_most(f"{workload.name}: largest difference of a tile and /metrics", largest, 0),
        ]
    return report.part(rows, targets, commands=commands)


def in_turns(server: engines.Running, workload: Workload, n_turns: int) -> dict[str, Any]:
    """Sends all with the page closed, open, closed, ... closed, after one run that nothing is taken from.

    Each run with the page open is compared with the mean of those before and after it, since a machine's speed drifts; so is each
    run with the page closed that lies between two others of its kind, which shows the noise.
    """

    def requests_per_s(page: str, turn: int) -> float:
        with opened(server.url) if page == "open" else nullcontext():
            server.flush_cache()
            outcomes = client.run(server.url, workload.dues, f"{workload.name}, {page}, turn {turn + 1}")
        return client.figures(outcomes).requests_per_s

    client.run(server.url, workload.dues, "warm-up")
    closed, opens = [requests_per_s("closed", 0)], []
    for turn in range(n_turns):
        opens.append(requests_per_s("open", turn))
        closed.append(requests_per_s("closed", turn + 1))
    ratios = [one / statistics.mean(closed[turn : turn + 2]) for turn, one in enumerate(opens)]
    identical = [
        one / statistics.mean((before, after))
        for before, one, after in zip(closed, closed[1:], closed[2:], strict=False)
    ]
    return {
        "workload": workload.name,
        "requests": len(workload.dues),
        "closed_requests_per_s": closed,
        "open_requests_per_s": opens,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "identical_ratios": identical,
        "identical_ratio": statistics.median(identical) if identical else None,
    }


@contextmanager
def opened(url: str) -> Iterator[None]:
    """Looks at the dashboard in a browser meanwhile. Raises InvalidRunError where it shows nothing, or has failed since."""
    command = [sys.executable, str(BROWSER), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
        assert browser.stdin is not None
        assert browser.stdout is not None
        if browser.stdout.readline().strip() != "looking":
            raise report.InvalidRunError(f"the page shows nothing: {report.portable(command)}")
        try:
            yield
        finally:
            browser.stdin.close()
    if browser.returncode:
        raise report.InvalidRunError(f"the page did not stay open: {report.portable(command)}")


def against_metrics(url: str) -> dict[str, float]:
    """Returns what a browser shows in each tile less what /metrics says, where nothing runs."""
    looked = subprocess.run([sys.executable, str(BROWSER), url, "--tiles"], capture_output=True, text=True, check=True)
    tiles = json.loads(looked.stdout)
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {
        tile: tiles[tile]
        - sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"sglang:prefill_{name}{{"))
        for tile, name in COUNTED.items()
    }
