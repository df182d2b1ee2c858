"""How much more traffic of the paper's WL1 does each engine carry, and at what latency (Figs. 6, 7 and 9)?

    python benchmarks/post_recommendation/run.py [--quick] [--json PATH]

Unscaled on a GPU, all lengths divided by 10 without one. See the README beside this file.
"""

from __future__ import annotations

import bisect
import math
import os
import statistics
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
# The paper's 20, half of them where bfloat16 is slow: the whole takes hours.
USERS, QUICK_USERS = int(os.environ.get("BENCH_USERS", "20" if shapes.DTYPE == "bfloat16" else "10")), 3
KV_TOKENS = 2 * (17_000 + 150) // SCALE  # of two users
# A device is lent for minutes.
LOADS, QUICK_LOADS = (0.5, 1.0, 2.0) if shapes.HAS_CUDA else (0.25, 0.5, 1.0, 2.0, 3.0, 4.0), (1.0,)
# An engine's latency far beyond what it serves is the length of the run, whatever it is.
FURTHEST_LOAD = 2.0
KEPT_UP = 0.95  # a run of so many requests ends with some that came last: as much as all of what was offered
# An engine's runs at one load together take so long at least: between minutes a machine's speed differs.
TURNS_S, QUICK_TURNS_S = 1.0 if shapes.HAS_CUDA else 50.0, 1.0
TIMES = (1.0, 1.3, 2.0, 4.0) if shapes.HAS_CUDA else (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
QUICK_TIMES = (1.0,)
BEYOND_HOPE = 1.5  # asked for so many times what it serves at once, an engine keeps no pace
LAMBDA = ("--fairness-lambda", str(500 / SCALE))  # the paper's; it counts tokens, which are divided by SCALE too
ONE = engines.ours("ours, one a step", *LAMBDA)
PACKED = engines.ours("ours, packed", "--pack-step-tokens", "auto", "--sharers", "count", *LAMBDA)
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
    loads, times, turns_s = (QUICK_LOADS, QUICK_TIMES, QUICK_TURNS_S) if arguments.quick else (LOADS, TIMES, TURNS_S)

    with comparison_of(arguments, "single") as comparison:
        chosen = (PACKED,) if arguments.quick else (ONE, PACKED)
        x = comparison.saturation_of(chosen[0])
        rates = [load * x for load in loads]
        every: list[Rate] = [SATURATION, *rates]
        # Ours and the rival that is strongest here take turns; a device holds one engine at a time.
        for turn in [every] if shapes.HAS_CUDA else [[rate] for rate in every]:
            for engine in (chosen[-1], POLICIES[0]):
                comparison.measure(engine, turn)
        rivals = POLICIES[:1] if arguments.quick else (*POLICIES, *NEWER, DEFAULT)
        curves = {rival: runs for rival in rivals if (runs := curve(comparison, rival, rates)) is not None}
        if not (arguments.quick or shapes.HAS_CUDA):
            for engine in (UNCHUNKED, AS_SHIPPED):
                comparison.measure_rival(engine, [SATURATION])
        capacities = []
        for ours in reversed(chosen):
            mine = comparison.measure(ours, every)
            capacities += [
                capacity(comparison, ours, rival, (mine[0], runs[0]), times, turns_s)
                for rival, runs in curves.items()
                if rival in (DEFAULT, best_of(curves, x))
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

    comparison = Comparison(arguments, requests_of, SERVED, n_servers=1 if shapes.HAS_CUDA else 2)
    comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE, "users": n_users}
    return comparison


def curve(comparison: Comparison, engine: engines.Engine, rates: list[float]) -> list[Run] | None:
    """All at once, then latency against load, up to twice what the engine serves; None where it cannot be measured."""
    runs = comparison.measure_rival(engine, [SATURATION])
    if runs is None:
        return None
    own = runs[0].figures.requests_per_s
    return [*runs, *comparison.measure(engine, [rate for rate in rates if rate <= FURTHEST_LOAD * own])]


def best_of(curves: dict[engines.Engine, list[Run]], x: float) -> engines.Engine | None:
    """The policy other than the default with the lowest mean latency at x, of those that serve enough to be asked there."""
    at_x = {
        rival: run.figures.mean_s
        for rival, runs in curves.items()
        for run in runs
        if run.offered_per_s == x and rival != DEFAULT
    }
    return min(at_x, key=lambda rival: at_x[rival], default=None)


def capacity(
    comparison: Comparison,
    ours: engines.Engine,
    rival: engines.Engine,
    at_once: tuple[Run, Run],
    times: tuple[float, ...],
    turns_s: float,
) -> dict[str, str | float | None]:
    """The highest of these multiples of a rival's saturation at which ours keeps the rival's mean, P99 and pace there.

    The pace matters because a run has an end: what an engine cannot serve waits no longer than that. Kept is the share of
    the offered rate that the rival itself serves, or nearly all. Both take turns, and medians count. Found by halving
    `times` again and again: what is held at one load is taken as held at all lower ones.

    Args:
        at_once: the runs of ours and of the rival with all submitted at once, which say what they serve.
        turns_s: an engine's runs at one load together take so long at least.
    """
    ours_per_s, rival_per_s = (run.figures.requests_per_s for run in at_once)
    n_turns = math.ceil(turns_s * rival_per_s / at_once[1].figures.requests)
    times = times[: max(1, bisect.bisect_right(times, BEYOND_HOPE * ours_per_s / rival_per_s))]

    def is_beyond(one: float) -> bool:
        mine, theirs = [], []
        for turn in range(1, n_turns + 1):
            # A run that takes minutes is not made again for each of ours.
            against = f"against {ours.name}" + (f" at {one:g}x, {turn}" if n_turns > 1 else "")
            theirs += comparison.measure(rival, [rival_per_s], against)
            mine += comparison.measure(ours, [one * rival_per_s], f"against {rival.name}, {turn}")
        limit, found = medians(theirs), medians(mine)
        return found[0] > limit[0] or found[1] > limit[1] or found[2] < min(limit[2], KEPT_UP)

    n_held = bisect.bisect_left(times, True, key=is_beyond)
    held = times[n_held - 1] if n_held else None
    shown = "not held" if held is None else f">= {held:g}" if n_held == len(times) else f"{held:g}"
    return {"engine": ours.name, "rival": rival.name, "rival_per_s": rival_per_s, "times": held, "shown": shown}


def medians(runs: list[Run]) -> tuple[float, float, float]:
    """Of mean latency, P99 and the share of the offered rate that was answered."""
    return (
        statistics.median(run.figures.mean_s for run in runs),
        statistics.median(run.figures.p99_s for run in runs),
        statistics.median(run.kept_up for run in runs),
    )


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
