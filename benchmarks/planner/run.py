"""What does the policy do to hit rate and latency on the paper's WL1, unscaled, and what does lambda trade?

    python benchmarks/planner/run.py [--quick] [--json PATH]

Replays on a simulated clock, through the engine's own policy, KV plan and prefix tree. See the README beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from sgl_prefill import plan
from sgl_prefill.config import PrefillConfig
from sgl_prefill.planner import workloads
from sgl_prefill.planner.simulate import name_of

# The longest profiles of two users, each with a post.
REPLAY = argparse.Namespace(durable_tokens=2 * (17_000 + 150), page_tokens=50)
PROFILE = plan.EXAMPLE_PROFILE
LAMBDAS = (0.0, 100.0, 500.0, 2000.0)
# What a user gets, the paper's engine, and what both are compared with, filling its steps as the default does.
OURS, PAPER, FIFO = PrefillConfig(), PrefillConfig(paper=True), PrefillConfig(scheduling="fifo")
SEEDS = range(5)
MANY_USERS = 20_000
FIGURES = ("token_saving", "requests_per_s", "mean_s", "p50_s", "p99_s", "longest_wait_s")


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = {**report.conditions(), "profile": PROFILE._asdict(), "durable_tokens": REPLAY.durable_tokens}
    seeds, n_users = (range(1), 200) if arguments.quick else (SEEDS, MANY_USERS)
    saturation = conditions["saturation_requests_per_s"] = saturation_of()
    rows: list[dict[str, Any]] = []
    shown: list[plan.Summary] = []
    for arrivals, load in (("burst", 4.0), ("burst", 2.0), ("single", 2.0)):
        for seed in seeds:
            trace = trace_of(arrivals, load * saturation, seed)
            ceiling = workloads.ceiling_of_saving(trace)
            for config in configs():
                summary = plan.summarize(trace, config, PROFILE, REPLAY)
                row = {"arrivals": arrivals, "load": load, "seed": seed, "of_ceiling": summary.token_saving / ceiling}
                rows.append({**row, **summary._replace(latencies_s=[])._asdict()})
                if arrivals == "single" and seed == 0:
                    shown.append(summary)
    million = many(n_users, 0.9 * saturation)
    curves = {one.name: [plan.percentile(one.latencies_s, percent) for percent in range(1, 101)] for one in shown}
    report.finish(
        {
            "conditions": conditions,
            "means": means_of(rows),
            "rows": rows,
            "million": million,
            "latency_percentiles_s": curves,
        },
        targets_of(rows),
        arguments.json,
    )
    return 0


def configs() -> list[PrefillConfig]:
    """Returns the engines, and the steps from the paper's towards ours with a request a step: its cost, then its sharers."""
    alone = [one_a_step(scheduling=name) for name in ("fifo", "srjf")]
    calibrated = [one_a_step(fairness_lambda=value) for value in LAMBDAS]
    sharing = [dataclasses.replace(config, sharers="count") for config in calibrated]
    return [OURS, PAPER, FIFO, *alone, *calibrated, *sharing]


def one_a_step(**options: Any) -> PrefillConfig:
    return PrefillConfig(**{"pack_step_tokens": 0, "sharers": "ignore", **options})


def trace_of(arrivals: Any, requests_per_s: float, seed: int, **options: Any) -> list[workloads.Arrival]:
    return workloads.post_recommendation(random.Random(seed), requests_per_s, arrivals=arrivals, **options)


def saturation_of() -> float:
    """The paper's x: requests a second with all submitted at once, by default."""
    trace = trace_of("at-once", 1.0, 0)
    return plan.summarize(trace, OURS, PROFILE, REPLAY).requests_per_s


def many(n_users: int, requests_per_s: float) -> dict[str, Any]:
    """How long a long trace takes to replay."""
    trace = trace_of("burst", requests_per_s, 0, n_users=n_users)
    started = time.perf_counter()
    summary = plan.summarize(trace, OURS, PROFILE, REPLAY)
    return {"requests": summary.n_requests, "seconds": time.perf_counter() - started, "saving": summary.token_saving}


def means_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each setting's figures over the seeds."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["arrivals"], row["load"], row["name"]), []).append(row)
    return [
        {
            **dict(zip(("arrivals", "load", "setting"), key, strict=True)),
            **{name: statistics.fmean(row[name] for row in of_setting) for name in FIGURES},
        }
        for key, of_setting in groups.items()
    ]


def targets_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    """Means over the seeds."""

    def mean(arrivals: str, load: float, name: str, figure: str) -> float:
        of_run = arrivals, load, name
        values = [row[figure] for row in rows if (row["arrivals"], row["load"], row["name"]) == of_run]
        return float(sum(values) / len(values))

    def ratio(arrivals: str, load: float, figure: str, one: str, other: str) -> float:
        return mean(arrivals, load, one, figure) / mean(arrivals, load, other, figure)

    default, fifo = name_of(OURS), name_of(FIFO)
    pure, strong = (name_of(one_a_step(fairness_lambda=value)) for value in (LAMBDAS[0], LAMBDAS[-1]))
    targets = [
        report.Target.at_least(
            "simulated, bursts at 4x, ours: tokens saved / ceiling", mean("burst", 4.0, default, "of_ceiling"), 0.95
        ),
        # Fig. 11: a larger lambda costs in the mean and gains in P99.
        report.Target.at_least(
            "simulated, bursts at 4x: mean, lambda 2000 / lambda 0", ratio("burst", 4.0, "mean_s", strong, pure), 1.0
        ),
        report.Target.at_most(
            "simulated, bursts at 4x: P99, lambda 2000 / lambda 0", ratio("burst", 4.0, "p99_s", strong, pure), 1.0
        ),
    ]
    for shown, arrivals in (("single arrivals", "single"), ("bursts", "burst")):
        targets += [
            report.Target.at_least(
                f"simulated, {shown} at 2x: mean, FIFO / ours", ratio(arrivals, 2.0, "mean_s", fifo, default), 2.0
            ),
            report.Target.at_most(
                f"simulated, {shown} at 2x: P99, ours / FIFO", ratio(arrivals, 2.0, "p99_s", default, fifo), 1.0
            ),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
