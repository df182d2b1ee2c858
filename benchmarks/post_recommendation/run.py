"""How much more traffic of the paper's WL1 does each engine carry, and at what latency (Figs. 6, 7 and 9)?

    python benchmarks/post_recommendation/run.py [--quick] [--json PATH]

Unscaled on a GPU, all lengths divided by 10 without one. See the README beside this file.
"""

from __future__ import annotations

import bisect
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run, Served

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
USERS, QUICK_USERS = int(os.environ.get("BENCH_USERS", "20")), 3
KV_TOKENS = 2 * (17_000 + 150) // SCALE  # of two users
# A device is lent for minutes.
LOADS, QUICK_LOADS = (0.5, 1.0, 2.0) if shapes.HAS_CUDA else (0.25, 0.5, 1.0, 2.0, 3.0, 4.0), (1.0,)
# An engine's latency far beyond what it serves is the length of the run, whatever it is.
FURTHEST_LOAD = 2.0
KEPT_UP = 0.95  # a run of so many requests ends with some that came last: as much as all of what was offered
TIMES = (1.0, 1.3, 2.0, 4.0) if shapes.HAS_CUDA else (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
QUICK_TIMES = (1.0,)
# lambda counts tokens, which are divided by SCALE too.
ONE = engines.ours("ours, one a step", "--fairness-lambda", str(500 / SCALE))
PACKED = engines.ours(
    "ours, packed", "--pack-step-tokens", "auto", "--sharers", "count", "--fairness-lambda", str(1000 / SCALE)
)
ABLATIONS = (
    ONE._replace(name="ours, hybrid off", flags=(*ONE.flags, "--hybrid-prefill", "off")),
    ONE._replace(name="ours, KV kept", flags=(*ONE.flags, "--suffix-kv", "keep")),
    ONE._replace(name="ours, cache-miss JCT", flags=(*ONE.flags, "--jct-model", "cache-miss")),
    engines.ours("ours, stock scheduling", "--scheduling", "stock"),
)
DEFAULT = engines.stock("fcfs")
POLICIES = (engines.stock("dfs-weight"), *(() if shapes.HAS_CUDA else (engines.stock("lpm"),)))
NEWER = tuple(engines.newer(policy) for policy in ("shortest-prefill-first", "hrrn", "lpm"))
# Shown with all submitted at once only.
UNCHUNKED = engines.stock("dfs-weight", "--chunked-prefill-size", "-1")._replace(name="stock dfs-weight, unchunked")
AS_SHIPPED = engines.stock("dfs-weight", "--attention-backend", "torch_native")._replace(
    name="stock dfs-weight, torch_native"
)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    loads, times = (QUICK_LOADS, QUICK_TIMES) if arguments.quick else (LOADS, TIMES)

    with comparison_of(arguments, "single") as comparison:
        chosen = (PACKED,) if arguments.quick else (ONE, PACKED)
        x = comparison.saturation_of(chosen[0])
        rates = [load * x for load in loads]
        rivals = POLICIES[:1] if arguments.quick else (*POLICIES, *NEWER, DEFAULT)
        limits = {rival.name: curve(comparison, rival, rates) for rival in rivals}
        # Of the others, those that serve little with all at once are no limit to speak of; they are in the curves.
        limits = {
            name: limit
            for name, limit in limits.items()
            if limit is not None and (name == DEFAULT.name or (limit.offered_per_s or 0.0) > x / 2)
        }
        if not (arguments.quick or shapes.HAS_CUDA):
            for engine in (UNCHUNKED, AS_SHIPPED):
                comparison.measure_rival(engine, [SATURATION])
        capacities = []
        for ours in reversed(chosen):
            comparison.measure(ours, [SATURATION, *rates])
            capacities += [
                {"engine": ours.name, "rival": rival, **capacity(comparison, ours, limit, times)}
                for rival, limit in limits.items()
            ]
        if not (arguments.quick or shapes.HAS_CUDA):
            for engine in ABLATIONS:
                comparison.measure(engine, [SATURATION])
    comparison.finish(targets_of(capacities), capacities=capacities)
    return 0


SERVED = Served(
    MODEL,
    ["--context-length", str(40_960 // SCALE), "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
    ["--max-input-length", str(20_480 // SCALE), *shapes.budget(3)],
)


def comparison_of(arguments: Any, arrivals: traffic.Arrivals) -> Comparison:
    """Of engines that serve WL1, its requests coming one by one or a user's together."""
    n_users = QUICK_USERS if arguments.quick else USERS

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.post_recommendation(rate, arrivals, SCALE, n_users=n_users)

    comparison = Comparison(arguments, requests_of, SERVED)
    comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE, "users": n_users}
    return comparison


def curve(comparison: Comparison, engine: engines.Engine, rates: list[float]) -> Run | None:
    """Latency against load, up to twice what the engine serves; its run at exactly what it serves is returned."""
    runs = comparison.measure_rival(engine, [SATURATION])
    if runs is None:
        return None
    own = runs[0].figures.requests_per_s
    comparison.measure(engine, [rate for rate in rates if rate <= FURTHEST_LOAD * own])
    return comparison.measure(engine, [own])[0]


def capacity(
    comparison: Comparison, engine: engines.Engine, limit: Run, times: tuple[float, ...]
) -> dict[str, str | float | None]:
    """The highest of these multiples of a rival's saturation at which ours keeps the rival's mean, P99 and pace.

    The pace matters because a run has an end: what an engine cannot serve waits no longer than that. Kept is the share of
    the offered rate that the rival itself serves, or nearly all. Found by halving `times` again and again: what is held at
    one load is taken as held at all lower ones.
    """
    assert limit.offered_per_s is not None
    rival_per_s = limit.offered_per_s

    def is_beyond(one: float) -> bool:
        (run,) = comparison.measure(engine, [one * rival_per_s])
        is_within = run.figures.mean_s <= limit.figures.mean_s and run.figures.p99_s <= limit.figures.p99_s
        return not is_within or run.kept_up < min(limit.kept_up, KEPT_UP)

    n_held = bisect.bisect_left(times, True, key=is_beyond)
    held = times[n_held - 1] if n_held else None
    shown = "not held" if held is None else f">= {held:g}" if n_held == len(times) else f"{held:g}"
    return {"rival_per_s": rival_per_s, "times": held, "shown": shown}


def targets_of(capacities: list[dict[str, Any]]) -> list[report.Target]:
    """A rate that was not held at all counts as 0."""
    targets = []
    for ours in (PACKED.name, ONE.name):
        of_engine = [row for row in capacities if row["engine"] == ours]
        default = [row for row in of_engine if row["rival"] == DEFAULT.name]
        policies = [row for row in of_engine if row["rival"] != DEFAULT.name]
        for rival, rows, target in ((DEFAULT.name, default, 4.0), ("the best policy of either version", policies, 1.3)):
            if rows:
                times = min(row["times"] or 0.0 for row in rows)
                targets.append(report.Target.at_least(f"WL1, load carried, {ours} / {rival}", times, target))
    return targets


if __name__ == "__main__":
    sys.exit(main())
