"""The paper's WL1 with a user's 50 requests arriving together: what is left to gain where first come, first served caches well?

    python benchmarks/bursts/run.py [--quick] [--json PATH]

The engines, model and scale of ../post_recommendation. See the README beside this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.harness import engines
from benchmarks.harness.turns import of_reference
from benchmarks.post_recommendation.run import BURSTS, comparison_of

LOADS = (0.5, 1.0, 2.0)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    with comparison_of(arguments, "burst") as comparison:
        x = comparison.saturation_of(engines.OURS)
        loads = LOADS[1:2] if arguments.quick else LOADS
        contest = BURSTS.smoke() if arguments.quick else BURSTS
        found = comparison.take_turns(contest, [load * x for load in loads], cost=lambda one: one.mean_s)
    targets = []
    for index, load in enumerate(loads):
        for engine in contest.ours:
            for reference in contest.references:
                if (best := of_reference(found, reference)) is not None:
                    mine, theirs = found[engine][index], found[best][index]
                    shown, rival = f"bursts at {load:g}x, {engine.name}", f"best stock policy, {reference.name}"
                    targets += [
                        report.Target.at_least(f"{shown}: mean, {rival} / ours", theirs.mean_s / mine.mean_s, 1.0),
                        report.Target.at_most(f"{shown}: P99, ours / {rival}", mine.p99_s / theirs.p99_s, 1.0),
                    ]
    comparison.finish(targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
