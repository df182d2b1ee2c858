"""Which order of the queue should be the default: do sharers count, and what does a second of waiting count for?

    python benchmarks/defaults/run.py [--quick] [--json PATH]

Ours alone, by setting in turns, on workloads of other benchmarks. See the README beside this file.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers
from benchmarks.post_recommendation import run as wl1
from benchmarks.short_mix.run import SERVED as SHORT_MIX_SERVED

SETTINGS = (
    engines.ours("sharers ignored, lambda 500", "--sharers", "ignore", "--fairness-lambda", "500"),
    engines.ours("sharers ignored, lambda 50", "--sharers", "ignore", "--fairness-lambda", "50"),
    engines.ours("sharers count, lambda 500", "--sharers", "count", "--fairness-lambda", "500"),
    engines.ours("sharers count, lambda 50", "--sharers", "count", "--fairness-lambda", "50"),
)
LOADS = (1.0, 2.0)  # of what the first setting serves at once
TURNS = 3


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions: dict[str, Any] = {**report.conditions(), "commands": {}, "x_requests_per_s": {}}
    records: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for workload, (served, requests_of) in workloads(arguments.quick).items():
        with Servers(served, len(SETTINGS)) as servers:

            def measure(engine: engines.Engine, rate: float | None, name: str) -> client.Figures:
                server = servers.of(engine)
                conditions["commands"][f"{workload}: {engine.name}"] = server.command
                records[f"{workload}: {engine.name}"] = server.record
                server.flush_cache()
                return client.figures(client.run(server.url, requests_of(rate), f"{workload}, {engine.name}, {name}"))

            x = max(measure(SETTINGS[0], None, "at once").requests_per_s for _ in range(2))  # the first time is warm-up
            conditions["x_requests_per_s"][workload] = x
            for load in (None, *LOADS[: 1 if arguments.quick else None]):
                for turn in range(1, (1 if arguments.quick else TURNS) + 1):
                    for engine in SETTINGS[: 2 if arguments.quick else None]:
                        figures = measure(engine, load and load * x, f"{load or 'at once'}, turn {turn}")
                        row = {"workload": workload, "load": load, "setting": engine.name, "turn": turn}
                        rows.append({**row, **figures._asdict()})
                        print(rows[-1], file=sys.stderr)
    result = {"conditions": conditions, "activation_records": records, "medians": medians_of(rows), "rows": rows}
    report.finish(result, [], arguments.json)
    return 0


def workloads(is_quick: bool) -> dict[str, tuple[Served, Any]]:
    n_users, n_each = (wl1.QUICK_USERS, 3) if is_quick else (wl1.USERS, 30)

    def posts(rate: float | None, arrivals: traffic.Arrivals) -> list[client.Due]:
        return traffic.post_recommendation(rate, arrivals, wl1.SCALE, n_users=n_users, n_posts=wl1.POSTS)

    return {
        "WL1": (wl1.SERVED, lambda rate: posts(rate, "single")),
        "bursts": (wl1.SERVED, lambda rate: posts(rate, "burst")),
        "short mix": (SHORT_MIX_SERVED, lambda rate: traffic.short_mix(rate, n_each)),
    }


def medians_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the turns."""
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
