"""Which order of the queue should be the default: do sharers count, and what does a second of waiting count for?

    python benchmarks/defaults/run.py [--quick] [--json PATH]

Ours alone, by setting in turns, on WL1. See the README beside this file.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "commands": {}, "x_requests_per_s": {}}
    records: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    n_users = QUICK_USERS if arguments.quick else USERS
    turns, settings, loads = (1, SETTINGS[:2], LOADS[:2]) if arguments.quick else (TURNS, SETTINGS, LOADS)

    @functools.cache
    def requests_of(workload: str, rate: float | None) -> list[client.Due]:
        return traffic.post_recommendation(rate, ARRIVALS[workload], wl1.SCALE, n_users=n_users, n_posts=POSTS)

    with Servers(wl1.SERVED, len(SETTINGS)) as servers:

        def measure(engine: engines.Engine, workload: str, rate: float | None, name: str) -> client.Figures:
            server = servers.of(engine)
            conditions["commands"][engine.name], records[engine.name] = server.command, server.record
            server.flush_cache()
            return client.figures(client.run(server.url, requests_of(workload, rate), f"{workload}, {name}"))

        for workload in ARRIVALS:
            # The first time is warm-up.
            x = max(measure(settings[0], workload, None, "at once").requests_per_s for _ in range(2))
            conditions["x_requests_per_s"][workload] = x
            for load, turn in itertools.product(loads, range(1, turns + 1)):
                for engine in settings:
                    figures = measure(
                        engine, workload, load and load * x, f"{engine.name}, {load or 'at once'}, {turn}"
                    )
                    row = {"workload": workload, "load": load, "setting": engine.name, "turn": turn}
                    rows.append({**row, **figures._asdict()})
    medians = medians_of(rows)
    result = {"conditions": conditions, "activation_records": records, "medians": medians, "rows": rows}
    report.finish(result, targets_of(medians), arguments.json)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
