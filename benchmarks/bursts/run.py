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
from benchmarks.post_recommendation.run import DEFAULT, ONE, PACKED, POLICIES, comparison_of

LOADS = (0.5, 1.0, 2.0)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    with comparison_of(arguments, "burst") as comparison:
        x = comparison.saturation_of(ONE)
        rates = [load * x for load in (LOADS if not arguments.quick else LOADS[1:2])]
        chosen = (ONE,) if arguments.quick else (ONE, PACKED)
        ours = {engine.name: comparison.measure(engine, rates) for engine in chosen}
        rivals = (DEFAULT, *POLICIES) if not arguments.quick else (DEFAULT,)
        theirs = [runs for rival in rivals if (runs := comparison.measure_rival(rival, rates)) is not None]
    targets = []
    for index, rate in enumerate(rates):
        best_mean_s = min(runs[index].figures.mean_s for runs in theirs)
        best_p99_s = min(runs[index].figures.p99_s for runs in theirs)
        for name, runs in ours.items():
            figures = runs[index].figures
            shown = f"bursts at {rate / x:g}x, {name}"
            targets += [
                report.Target.at_least(f"{shown}: mean, best stock policy / ours", best_mean_s / figures.mean_s, 1.0),
                report.Target.at_most(f"{shown}: P99, ours / lowest of any policy", figures.p99_s / best_p99_s, 1.0),
            ]
    comparison.finish(targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
