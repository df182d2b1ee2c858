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
from benchmarks.harness.client import Due, Figures
from benchmarks.harness.compare import Comparison, Rate
from benchmarks.harness.turns import MANY, Contest, Served, of_reference

MODEL = shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-small"
N_EACH, QUICK_EACH = 30, 3
CONTEST = Contest((engines.stock("fcfs"), engines.stock("lpm"), engines.stock("shortest-prefill-first")))
AT_LEAST = 4.0  # times the mean of the best policy
SERVED = Served(
    MODEL,
    ["--context-length", "10000", "--max-total-tokens", "40000", "--max-running-requests", "64"],
    ["--max-input-length", "8300", *shapes.budget(4)],
)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_each = QUICK_EACH if arguments.quick else N_EACH

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.short_mix(rate, n_each)

    with Comparison(arguments, requests_of, SERVED, n_servers=MANY) as comparison:
        x = comparison.saturation_of(engines.OURS)
        contest = CONTEST.smoke() if arguments.quick else CONTEST
        found = comparison.take_turns(contest, [x], cost=lambda one: one.mean_s)
    comparison.finish(targets_of({engine: figures for engine, (figures,) in found.items()}))
    return 0


def targets_of(found: dict[engines.Engine, Figures]) -> list[report.Target]:
    """Compares with the policy with the lowest mean of each reference."""
    targets = []
    for engine in found:
        for reference in engines.REFERENCES:
            best = of_reference(found, reference)
            if engine.is_ours and best is not None:
                ratio, p99_ratio = (
                    found[best].mean_s / found[engine].mean_s,
                    found[engine].p99_s / found[best].p99_s,
                )
                row, theirs = f"short mix, {engine.name}", f"best policy, {reference.name}"
                targets.append(report.Target.at_least(f"{row}: mean, {theirs} / ours", ratio, AT_LEAST))
                targets.append(report.Target.at_most(f"{row}: P99, ours / {theirs}", p99_ratio, 1.0))
    return targets


if __name__ == "__main__":
    sys.exit(main())
