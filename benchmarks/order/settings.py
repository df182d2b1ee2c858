"""Which order of the queue should be the default: do sharers count, and what does a second of waiting count for?

Ours alone, by setting in turns, on WL1.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import Any

from benchmarks import report
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Servers
from benchmarks.load import wl1

SETTINGS = tuple(
    engines.ours(f"sharers {sharers}, lambda {weight}", "--set", f"sharers={sharers}", "--fairness-lambda", weight)
    for sharers, weight in (("ignore", "500"), ("count", "500"), ("count", "200"), ("count", "50"))
)
LOADS = (None, 1.0, 2.0)  # of what the first setting serves at once; None: all at once
ARRIVALS: dict[str, traffic.Arrivals] = {"WL1": "single", "WL1 in bursts": "burst"}
TURNS = 5
USERS, QUICK_USERS, POSTS = 10, 3, 30


def measure(quick: bool) -> dict[str, Any]:
    commands: dict[str, str] = {}
    served_at_once: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    n_users = QUICK_USERS if quick else USERS
    turns, settings, loads = (1, SETTINGS[:2], LOADS[:2]) if quick else (TURNS, SETTINGS, LOADS)

    @functools.cache
    def requests_of(workload: str, rate: float | None) -> list[client.Due]:
        return traffic.post_recommendation(rate, ARRIVALS[workload], wl1.SCALE, n_users=n_users, n_posts=POSTS)

    with Servers(wl1.SERVED, len(SETTINGS)) as servers:

        def ask(engine: engines.Engine, workload: str, rate: float | None, name: str) -> client.Figures:
            server = servers.of(engine)
            commands[engine.name] = server.command
            server.flush_cache()
            return client.figures(client.run(server.url, requests_of(workload, rate), f"{workload}, {name}"))

        for workload in ARRIVALS:
            # The first time is warm-up.
            x = max(ask(settings[0], workload, None, "at once").requests_per_s for _ in range(2))
            served_at_once[workload] = x
            for load, turn in itertools.product(loads, range(1, turns + 1)):
                for engine in settings:
                    figures = ask(engine, workload, load and load * x, f"{engine.name}, {load or 'at once'}, {turn}")
                    row = {"workload": workload, "load": load, "setting": engine.name, "turn": turn}
                    rows.append({**row, **figures._asdict()})
    medians = medians_of(rows)
    found = {"commands": commands, "x_requests_per_s": served_at_once, "medians": medians}
    return report.part(rows, targets_of(medians), **found)


def targets_of(medians: list[dict[str, Any]]) -> list[report.Target]:
    """The default against the paper's order, which ignores sharers."""
    of = {(row["workload"], row["load"], row["setting"]): row for row in medians}
    papers, default = (setting.name for setting in SETTINGS[:2])
    targets = []
    for workload, load in dict.fromkeys((row["workload"], row["load"]) for row in medians):
        mine, theirs = of[workload, load, default], of[workload, load, papers]
        for figure in ("mean_s", "p99_s"):
            name = f"{workload}, {'all at once' if load is None else f'{load:g}x'}: {figure}, {default} / {papers}"
            targets.append(report.Target.at_most(name, mine[figure] / theirs[figure], 1.0))
    return targets


def medians_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Takes the medians over the turns."""
    keys = dict.fromkeys((row["workload"], row["load"], row["setting"]) for row in rows)
    medians = []
    for workload, load, setting in keys:
        turns = [row for row in rows if (row["workload"], row["load"], row["setting"]) == (workload, load, setting)]
        figures = {
            name: statistics.median(row[name] for row in turns)
            for name in ("mean_s", "p99_s", "longest_s", "requests_per_s", "cached_share")
        }
        medians.append({"workload": workload, "load": load, "setting": setting, **figures})
    return medians
