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
from benchmarks.harness.client import Due, Figures
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run
from benchmarks.harness.turns import FIRST_TURN, MANY, Contest, Served, of_reference

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
# The paper's 20 users of 50 posts; BENCH_USERS names fewer where GPU time is short.
USERS, QUICK_USERS = int(os.environ.get("BENCH_USERS", "20")), 3
POSTS = 50
KV_TOKENS = 2 * (17_000 + 150) // SCALE  # of two users
LOADS = (0.5, 1.0, 2.0)  # of what ours serves at once: the points of the latency curves
# An engine's latency far beyond what it serves is the length of the run, whatever it is.
FURTHEST_LOAD = 2.0
KEPT_UP = 0.95  # of the offered rate: counts as all of it, since the last requests of a run are still being served when it ends
# Least seconds that a rival's runs at one load take together: between minutes a machine's speed differs.
TURNS_S, QUICK_TURNS_S = 1.0 if shapes.HAS_CUDA else 25.0, 1.0
N_LEAST_TURNS = 1 if shapes.HAS_CUDA else 3  # of our engine, whose runs take seconds beside a slow rival
TIMES = (1.0, 1.3, 2.0, 4.0) if shapes.HAS_CUDA else (1.0, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0)
QUICK_TIMES = (1.0,)
BEYOND_HOPE = 1.5  # no engine keeps the pace at this multiple of what it serves at once
ABLATIONS = (
    engines.ours("ours, hybrid off", "--hybrid-prefill", "off"),
    engines.ours("ours, KV kept", "--suffix-kv", "keep"),
    engines.ours("ours, cache-miss JCT", "--set", "jct_model=cache-miss"),
    engines.ours("ours, stock scheduling", "--scheduling", "stock"),
)
DEFAULT = engines.stock("fcfs")
SHORTEST, RATIO = (engines.stock(policy) for policy in ("shortest-prefill-first", "hrrn"))
# All submitted at once: a run of the slow ones takes a minute.
CONTEST = Contest((engines.stock("dfs-weight"), DEFAULT, SHORTEST, RATIO), n_turns=1 if shapes.HAS_CUDA else 2)
BURSTS = Contest((engines.stock("dfs-weight"), DEFAULT, SHORTEST))
AT_LEAST = {engines.AS_SHIPPED: 15.0, engines.PYTORCH_PATH: 2.5, engines.ON_DEVICE: 1.3}
AT_LEAST_DEFAULT = 4.0  # of the PyTorch path, all at once


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    times, turns_s = (QUICK_TIMES, QUICK_TURNS_S) if arguments.quick else (TIMES, TURNS_S)
    contest = CONTEST.smoke() if arguments.quick else CONTEST
    with comparison_of(arguments, "single") as comparison:
        at_once = {
            engine: runs[0] for engine, runs in comparison.take_turns(contest, [SATURATION], more_a_second).items()
        }
        x = at_once[engines.OURS].requests_per_s
        comparison.conditions["x_requests_per_s"] = x
        rivals = [best for reference in contest.references if (best := of_reference(at_once, reference)) is not None]
        for engine in () if arguments.quick else (*contest.ours, *rivals):
            furthest_per_s = FURTHEST_LOAD * at_once[engine].requests_per_s
            comparison.measure(engine, [load * x for load in LOADS if load * x <= furthest_per_s])
        capacities = [
            capacity(comparison, ours, rival, (at_once[ours], at_once[rival]), times, turns_s)
            for rival in rivals
            for ours in contest.ours
        ]
        if not (arguments.quick or shapes.HAS_CUDA):
            for engine in ABLATIONS:
                comparison.measure(engine, [SATURATION])
        # Asked already, where it was not left out.
        default = DEFAULT.on(contest.references[-1])
        runs = comparison.measure_rival(default, [SATURATION], FIRST_TURN) if DEFAULT in contest.policies else None
        if runs is not None:
            at_once[default] = runs[0].figures
    comparison.finish(targets_of(capacities, at_once), capacities=capacities)
    return 0


def more_a_second(figures: Figures) -> float:
    return -figures.requests_per_s


SERVED = Served(
    MODEL,
    ["--context-length", str(40_960 // SCALE), "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
    ["--max-input-length", str(20_480 // SCALE), *shapes.budget(3)],
)


def comparison_of(arguments: Any, arrivals: traffic.Arrivals) -> Comparison:
    """Opens a comparison of engines that serve WL1, its requests coming one by one or a user's together."""
    n_users = QUICK_USERS if arguments.quick else USERS

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.post_recommendation(rate, arrivals, SCALE, n_users=n_users, n_posts=POSTS)

    comparison = Comparison(arguments, requests_of, SERVED, n_servers=MANY)
    comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE, "users": n_users, "posts": POSTS}
    return comparison


def capacity(
    comparison: Comparison,
    ours: engines.Engine,
    rival: engines.Engine,
    at_once: tuple[Figures, Figures],
    times: tuple[float, ...],
    turns_s: float,
) -> dict[str, str | float | None]:
    """The highest of these multiples of a rival's saturation at which ours keeps the rival's mean, P99 and pace there.

    The pace is the share of the offered rate that the rival itself serves, or 95 %. Without it an overloaded engine would
    pass, since no request waits beyond the end of a run. Both engines take turns, and medians count. The search halves
    `times`: what is held at one load is taken as held at all lower ones.

    Args:
        at_once: the figures of this engine and of the rival, all requests submitted at once.
        turns_s: least seconds that the rival's runs at one load take together.
    """
    ours_per_s, rival_per_s = (figures.requests_per_s for figures in at_once)
    n_turns = math.ceil(turns_s * rival_per_s / at_once[1].requests)
    times = times[: max(1, bisect.bisect_right(times, BEYOND_HOPE * ours_per_s / rival_per_s))]

    def is_beyond(one: float) -> bool:
        mine, theirs = [], []
        for turn in range(1, max(n_turns, N_LEAST_TURNS) + 1):
            if turn <= n_turns:
                # A rival's run that takes minutes is not repeated for each of our turns.
                against = f"against {ours.name} at {one:g}x, {turn}" if n_turns > 1 else "at its own pace"
                theirs += comparison.measure(rival, [rival_per_s], against)
            mine += comparison.measure(ours, [one * rival_per_s], f"against {rival.name}, {turn}")
        limit, found = medians(theirs), medians(mine)
        return found[0] > limit[0] or found[1] > limit[1] or found[2] < min(limit[2], KEPT_UP)

    n_held = bisect.bisect_left(times, True, key=is_beyond)
    held = times[n_held - 1] if n_held else None
    shown = "not held" if held is None else f">= {held:g}" if n_held == len(times) else f"{held:g}"
    return {"engine": ours.name, "rival": rival.name, "rival_per_s": rival_per_s, "times": held, "shown": shown}


def medians(runs: list[Run]) -> tuple[float, float, float]:
    """Takes the medians of mean latency, P99 and the share of the offered rate that was answered."""
    return (
        statistics.median(run.figures.mean_s for run in runs),
        statistics.median(run.figures.p99_s for run in runs),
        statistics.median(run.kept_up for run in runs),
    )


def targets_of(capacities: list[dict[str, Any]], at_once: dict[engines.Engine, Figures]) -> list[report.Target]:
    """Makes the targets; a rate that was not held at all counts as 0."""
    targets = []
    for row in capacities:
        (reference,) = (one.reference for one in at_once if one.name == row["rival"])
        if row["engine"] == engines.OURS.name and reference is not None:
            name = f"WL1, load carried, ours / the best policy of either version, {reference.name}"
            targets.append(report.Target.at_least(name, row["times"] or 0.0, AT_LEAST[reference]))
    for rival, figures in at_once.items():
        if rival.reference is None or rival.reference == engines.NEW_KERNEL:
            continue
        is_default = rival == DEFAULT.on(rival.reference) and rival.reference != engines.AS_SHIPPED
        target = AT_LEAST_DEFAULT if is_default else AT_LEAST[rival.reference]
        ratio = at_once[engines.OURS].requests_per_s / figures.requests_per_s
        name = f"WL1, all at once: requests a second, ours / {rival.name}"
        targets.append(report.Target.at_least(name, ratio, target))
    return targets


if __name__ == "__main__":
    sys.exit(main())
