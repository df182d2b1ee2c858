"""Requests of 128 to 8,192 tokens that share nothing: how long do they wait at saturation under each policy?

    python benchmarks/short_mix/run.py [--quick] [--json PATH]

See the README beside this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Served

MODEL = "llama-3.1-8b" if shapes.HAS_CUDA else "llama-small"
N_EACH, QUICK_EACH = 50, 3
MAX_LOGPROB_DIFFERENCE = 0.25  # bfloat16, in steps of other sizes
ONE = engines.ours("ours, one a step")
PACKED = engines.ours("ours, packed", "--pack-step-tokens", "auto")
RIVALS = (engines.stock("fcfs"), engines.stock("lpm"))


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_each = QUICK_EACH if arguments.quick else N_EACH
    served = Served(
        MODEL,
        ["--context-length", "10000", "--max-total-tokens", "40000", "--max-running-requests", "64"],
        ["--max-input-length", "8300", *shapes.budget(4)],
    )

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.short_mix(rate, n_each)

    with Comparison(arguments, requests_of, served, MAX_LOGPROB_DIFFERENCE) as comparison:
        (at_once,) = comparison.measure(ONE, [SATURATION])
        x = comparison.conditions["x_requests_per_s"] = at_once.figures.requests_per_s
        rivals = [*RIVALS[: 1 if arguments.quick else None], *engines.newer("shortest-prefill-first")]
        figures = {engine.name: comparison.measure(engine, [x])[0].figures for engine in (ONE, PACKED, *rivals)}
    ours = figures[ONE.name]
    theirs = [figures[rival.name] for rival in rivals]
    best = min(theirs, key=lambda one: one.mean_s)
    targets = [
        report.Target.at_least("short mix: mean, stock fcfs / ours", figures["stock fcfs"].mean_s / ours.mean_s, 3),
        report.Target.at_least("short mix: mean, best policy of either version / ours", best.mean_s / ours.mean_s, 3),
        report.Target.at_most("short mix: P99, ours / stock fcfs", ours.p99_s / figures["stock fcfs"].p99_s, 1.0),
    ]
    comparison.finish(targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
