"""One long request under a steady stream of short hits that no engine can keep up with: how long does it wait?"""

from __future__ import annotations

from typing import Any

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due, Outcome
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run
from benchmarks.harness.turns import Served
from sgl_prefill.planner.workloads import Arrival

MODEL = shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-small"
PROFILE_TOKENS, POST_TOKENS = 350, 15
LONG_TOKENS = 20 * (PROFILE_TOKENS + POST_TOKENS)
LONG_ARRIVES_S, N_AT_ONCE = 5.0, 400
STREAM_S, QUICK_STREAM_S = 60.0, 12.0
OVERLOAD = 1.5
ALONE: Rate = 0.0  # the long request and one hit
MAX_QUEUE_S = 10.0
STEP_S = 0.5  # the bound makes a request the next one: a step may be running
BOUND = ("--set", f"max_queue_s={MAX_QUEUE_S}")
BOUNDED = engines.ours("ours, --max-queue-s 10", *BOUND)


def measure(quick: bool) -> dict[str, Any]:
    stream_s = QUICK_STREAM_S if quick else STREAM_S

    def requests_of(rate: Rate) -> list[Due]:
        if rate == ALONE:
            return traffic.with_tokens(
                [Arrival(0.0, "long", LONG_TOKENS - 1, 1), Arrival(0.0, "hit", PROFILE_TOKENS, POST_TOKENS)]
            )
        n_hits = N_AT_ONCE if rate is None else round(rate * stream_s)
        hits = [Arrival(at_s, "hit", PROFILE_TOKENS, POST_TOKENS) for at_s in traffic.poisson(rate, n_hits)]
        long = [] if rate is None else [Arrival(LONG_ARRIVES_S, "long", LONG_TOKENS - 1, 1)]
        return traffic.with_tokens(sorted([*hits, *long], key=lambda one: one.arrival_s))

    served = Served(
        MODEL,
        [
            "--context-length",
            "10000",
            "--max-total-tokens",
            "16000",
            "--max-running-requests",
            "64",
            "--enable-metrics",
        ],
        ["--max-input-length", str(LONG_TOKENS + 100), *shapes.budget(4)],
    )
    with Comparison(report.beside(__file__, "long_request", quick=quick), requests_of, served) as comparison:
        comparison.conditions |= {"stream_s": stream_s, "long_tokens": LONG_TOKENS}
        policies = (engines.stock("shortest-prefill-first"), engines.stock("lpm"), engines.stock("fcfs"))
        rivals = [policy.on(reference) for reference in engines.REFERENCES for policy in policies]
        chosen = (BOUNDED,) if quick else (BOUNDED, engines.PAPER, *rivals)
        longs = [one for engine in chosen if (one := wait_of_long(comparison, engine)) is not None]
    targets = [
        report.Target.at_most(
            f"the long request's time in the queue, {one['engine']}, s (bound {MAX_QUEUE_S:g})",
            one["queue_s"],
            MAX_QUEUE_S + STEP_S,
        )
        for one in longs
        if one["engine"] == BOUNDED.name
    ]
    return comparison.part(targets, long_request=longs)


def wait_of_long(comparison: Comparison, engine: engines.Engine) -> dict[str, Any] | None:
    """Under 1.5 times what this engine serves of the hits; None where it cannot be started."""
    runs = comparison.measure_rival(engine, [SATURATION, ALONE])
    if runs is None:
        return None
    at_once, alone = runs
    (run,) = comparison.measure(engine, [OVERLOAD * at_once.figures.requests_per_s])
    long, alone_s = long_of(run), long_of(alone).latency_s
    return {
        "engine": engine.name,
        "latency_s": long.latency_s,
        "alone_s": alone_s,
        "queue_s": long.queue_s,
        "answered_before_the_stream_ended": long.finish_s < max(one.at_s for one in run.outcomes),
        "hits_p99_s": run.figures.p99_s,
    }


def long_of(run: Run) -> Outcome:
    (long,) = (one for one in run.outcomes if one.prompt_tokens == LONG_TOKENS)
    return long
