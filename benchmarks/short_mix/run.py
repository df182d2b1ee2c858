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
from benchmarks.harness.compare import Comparison, Rate, Served

MODEL = shapes.DEVICE_MODEL if shapes.HAS_CUDA else "llama-small"
N_EACH, QUICK_EACH = 50, 3
ONE, PACKED = engines.ONE_A_STEP, engines.PACKED
RIVALS = (engines.stock("fcfs"), engines.stock("lpm"))
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

    with Comparison(arguments, requests_of, SERVED) as comparison:
        x = comparison.saturation_of(ONE)
        chosen = {"one a step": ONE} if arguments.quick else {"one a step": ONE, "packed": PACKED}
        ours = {name: comparison.measure(engine, [x])[0].figures for name, engine in chosen.items()}
        rivals = (*RIVALS, engines.newer("shortest-prefill-first")) if not arguments.quick else RIVALS[:1]
        found = {rival.name: comparison.measure_rival(rival, [x]) for rival in rivals}
    figures = {name: runs[0].figures for name, runs in found.items() if runs is not None}
    comparison.finish(targets_of(ours, figures))
    return 0


def targets_of(ours: dict[str, Figures], rivals: dict[str, Figures]) -> list[report.Target]:
    """Mean and P99 each against the policy that is best in it."""
    default_s = rivals[RIVALS[0].name].mean_s
    best_mean_s, best_p99_s = min(one.mean_s for one in rivals.values()), min(one.p99_s for one in rivals.values())
    targets = []
    for name, one in ours.items():
        targets += [
            report.Target.at_least(f"short mix, {name}: mean, stock fcfs / ours", default_s / one.mean_s, 3),
            report.Target.at_least(f"short mix, {name}: mean, best policy / ours", best_mean_s / one.mean_s, 3),
            report.Target.at_most(f"short mix, {name}: P99, ours / lowest of any policy", one.p99_s / best_p99_s, 1.0),
        ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
