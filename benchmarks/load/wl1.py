"""The paper's WL1, post recommendation: the posts of a user behind the user's profile."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due, Figures
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run
from benchmarks.harness.turns import FIRST_TURN, MANY, Contest, Served, of_reference
from benchmarks.load import curves
from sgl_prefill.plan import percentile

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
# The paper has 20 users: BENCH_USERS names another number.
USERS, QUICK_USERS = int(os.environ.get("BENCH_USERS", "6")), 3
POSTS = 50
KV_TOKENS = 2 * (17_000 + 150) // SCALE  # of two users
SERVED = Served(
    MODEL,
    ["--context-length", str(25_600 // SCALE), "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
    ["--max-input-length", str(20_480 // SCALE), *shapes.budget(3)],
)
TURNS_S, QUICK_TURNS_S = 1.0 if shapes.HAS_CUDA else 25.0, 1.0
TIMES = (1.0, 1.3, 2.0, 4.0) if shapes.HAS_CUDA else (1.0, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0)
QUICK_TIMES = (1.0,)
POLICIES = [engines.stock(name) for name in ("dfs-weight", "lpm", "fcfs", "shortest-prefill-first")]
# Of all policies the one with the lowest latency at a load that it can serve; another may serve more all at once.
STEADY = engines.stock("dfs-weight")
FCFS = engines.stock("fcfs").on(engines.REFERENCES[-1])  # what the papers' engines schedule with: for the curves
RIVALS = () if shapes.HAS_CUDA else (engines.VLLM,)
# Of each rival, on two cores.
AT_LEAST = {
    engines.AS_SHIPPED.name: 15.0,
    engines.PYTORCH_PATH.name: 2.5,
    engines.NEW_KERNEL.name: 1.3,
    engines.ON_DEVICE.name: 1.3,
    engines.VLLM.name: 2.0,
}
BURST_LOADS = (0.5, 1.0, 2.0)
LAMBDAS = (0, 500, 2000, 10_000)  # cache-miss tokens a second of waiting
FAIRNESS_LOAD = 1.0  # of what lambda 0 serves at once
# `--paper` itself allows no other lambda.
PAPER_BUT_LAMBDA = (
    *("--scheduling", "calibrated-srjf", "--fair-by", "none"),
    *("--set", "jct_model=cache-miss", "--set", "sharers=ignore", "--set", "pack_step_tokens=0"),
)


def compared(quick: bool, arrivals: traffic.Arrivals = "single", part: str = "wl1") -> Comparison:
    """Opens a comparison of engines that serve WL1, its requests coming one by one or a user's together."""
    n_users = QUICK_USERS if quick else USERS

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.post_recommendation(rate, arrivals, SCALE, n_users=n_users, n_posts=POSTS)

    comparison = Comparison(report.beside(__file__, part, quick=quick), requests_of, SERVED, n_servers=MANY)
    comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE, "users": n_users, "posts": POSTS}
    return comparison


def load(quick: bool) -> dict[str, Any]:
    """All at once, latency against load, and the load that ours carries at each rival's latency."""
    references = [*engines.REFERENCES]
    if not shapes.HAS_CUDA:
        references.insert(1, engines.PYTORCH_PATH)
    contest = Contest(POLICIES, 1 if shapes.HAS_CUDA else 2, references=references, others=RIVALS)
    contest = contest.smoke() if quick else contest
    with compared(quick) as comparison:
        first = comparison.take_turns(contest, [SATURATION], lambda one: -one.requests_per_s)
        at_once = {engine: runs[0] for engine, runs in first.items()}
        comparison.conditions["x_requests_per_s"] = ours_per_s = at_once[engines.OURS].requests_per_s
        steady = _once(comparison, map(STEADY.on, contest.references))
        steady |= {one: at_once[one] for one in steady if one in at_once}
        if not quick:
            shown = {one: figures for one, figures in steady.items() if one.reference != engines.PYTORCH_PATH}
            shown |= {one: figures for one, figures in at_once.items() if one.reference in (None, FCFS.reference)}
            curves.measure(comparison, shown | _once(comparison, [FCFS]))
        capacities = [
            curves.carried(
                comparison,
                engines.OURS,
                rival,
                (at_once[engines.OURS], figures),
                QUICK_TIMES if quick else TIMES,
                QUICK_TURNS_S if quick else TURNS_S,
            )
            for rival, figures in {**steady, **{one: at_once[one] for one in RIVALS if one in at_once}}.items()
        ]
    rivals = {one: figures.requests_per_s for one, figures in {**steady, **at_once}.items() if not one.is_ours}
    fastest = {one.reference: one for one in sorted(rivals, key=rivals.__getitem__)}
    targets = targets_of(ours_per_s, {one.name: rivals[one] for one in fastest.values()}, capacities)
    return comparison.part(targets, capacities=capacities)


def targets_of(
    ours_per_s: float, fastest: Mapping[str, float], capacities: Sequence[Mapping[str, str | float | None]]
) -> list[report.Target]:
    """fastest: of each reference, its requests a second all at once."""
    loads = {str(row["rival"]): float(row["times"] or 0.0) for row in capacities}  # 0: not held at all
    speeds = {rival: ours_per_s / per_s for rival, per_s in fastest.items()}
    return [
        report.Target.at_least(f"WL1, {what}, ours / {rival}", ratio, _wanted(rival))
        for what, ratios in (("load carried at equal mean and P99", loads), ("all at once: requests a second", speeds))
        for rival, ratio in ratios.items()
    ]


def _once(comparison: Comparison, rivals: Iterable[engines.Engine]) -> dict[engines.Engine, Figures]:
    """All at once, without engines that fail."""
    found = {one: comparison.measure_rival(one, [SATURATION], FIRST_TURN) for one in rivals}
    return {one: runs[0].figures for one, runs in found.items() if runs}


def _wanted(rival: str) -> float:
    return next(value for name, value in AT_LEAST.items() if rival == name or rival.endswith(f", {name}"))


def bursts(quick: bool) -> dict[str, Any]:
    """A user's 50 requests come together, so that first come, first served finds most of them cached; the kernels of all are
    the same. `--paper` runs one request a step (section 6.1), the others fill it."""
    contest = Contest(POLICIES, references=engines.REFERENCES[-1:])
    contest = contest.smoke() if quick else contest
    loads = BURST_LOADS[1:2] if quick else BURST_LOADS
    with compared(quick, "burst", "bursts") as comparison:
        x = comparison.saturation_of(engines.OURS)
        found = comparison.take_turns(contest, [load * x for load in loads], cost=lambda one: one.mean_s)
    best = of_reference(found, contest.references[-1])
    assert best is not None
    targets = []
    for index, at in enumerate(loads):
        for engine in contest.ours:
            mine, theirs = found[engine][index], found[best][index]
            shown = f"bursts at {at:g}x, {engine.name}"
            targets += [
                report.Target.at_least(f"{shown}: mean, {best.name} / ours", theirs.mean_s / mine.mean_s, 1.0),
                report.Target.at_most(f"{shown}: P99, ours / {best.name}", mine.p99_s / theirs.p99_s, 1.0),
            ]
    return comparison.part(targets)


def fairness(quick: bool) -> dict[str, Any]:
    """The paper's engine with other credits for waiting (Fig. 11): percentiles of live latencies, medians of three turns."""
    some = {
        value: engines.ours(f"lambda {value}", *PAPER_BUT_LAMBDA, "--fairness-lambda", str(value)) for value in LAMBDAS
    }
    found: dict[int, list[Run]] = {value: [] for value in LAMBDAS}
    with compared(quick, part="fairness") as comparison:
        x = comparison.saturation_of(some[0])
        for turn in ("turn 1",) if quick else ("turn 1", "turn 2", "turn 3"):
            for value, engine in some.items():
                found[value] += comparison.measure(engine, [FAIRNESS_LOAD * x], turn)
    means = {value: statistics.median(run.figures.mean_s for run in runs) for value, runs in found.items()}
    p99s = {value: statistics.median(run.figures.p99_s for run in runs) for value, runs in found.items()}
    targets = []
    for value in LAMBDAS[1:]:
        shown = f"lambda {value} / lambda 0, {FAIRNESS_LOAD:g}x"
        targets.append(report.Target.at_most(f"{shown}: P99", p99s[value] / p99s[0], 1.0))
        targets.append(report.Target.at_least(f"{shown}: mean", means[value] / means[0], 1.0))
    return comparison.part(targets, latency_percentiles_s={some[value].name: _cdf(found[value]) for value in LAMBDAS})


def _cdf(runs: list[Run]) -> list[float]:
    """The 1st to 100th percentile of the latencies of all runs together, in seconds."""
    latencies = sorted(one.latency_s for run in runs for one in run.outcomes)
    return [round(percentile(latencies, n), 4) for n in range(1, 101)]
