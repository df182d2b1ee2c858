"""Latency against load, and the load that one engine carries at another's latency."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import shapes
from benchmarks.harness import engines
from benchmarks.harness.client import Figures
from benchmarks.harness.compare import Comparison, Run

# Of what an engine serves with all requests submitted at once. The paper's x (section 7.3) is its own engine's rate; in one
# plot of latency against requests a second, rates of each engine's own show the bend of each curve.
LOADS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
SLOW_S, LOADS_OF_SLOW = (
    20.0,
    (0.5, 1.0, 2.0),
)  # of engines whose requests take so long at once: a load is a run of minutes
KEPT_UP = 0.95  # of the offered rate: counts as all of it
BEYOND_HOPE = 1.5  # no engine keeps the pace at this multiple of what it serves at once
N_LEAST_TURNS = 1 if shapes.HAS_CUDA else 3  # of our engine, whose runs take seconds beside a slow rival


def measure(comparison: Comparison, of: Mapping[engines.Engine, Figures]) -> None:
    """One run of each engine at multiples of its own rate. of: the figures with all requests submitted at once."""
    for engine, at_once in of.items():
        per_s = at_once.requests_per_s
        loads = LOADS_OF_SLOW if at_once.requests / per_s > SLOW_S else LOADS
        comparison.measure(engine, [load * per_s for load in loads])


def carried(
    comparison: Comparison,
    ours: engines.Engine,
    rival: engines.Engine,
    at_once: tuple[Figures, Figures],
    times: Sequence[float],
    turns_s: float,
) -> dict[str, str | float | None]:
    """The highest of these multiples of a rival's rate at which ours keeps the rival's mean, P99 and pace there.

    The pace is the share of the offered rate that the rival itself serves, or 95 %. Without it an overloaded engine would
    pass, since no request waits beyond the end of a run. Both engines take turns, and medians count. The search halves
    `times`: what is held at one load is taken as held at all lower ones.

    Args:
        at_once: the figures of this engine and of the rival, all requests submitted at once; the rival's rate is its rate there.
        turns_s: least seconds that the rival's runs at one load take together: between minutes a machine's speed differs.
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
