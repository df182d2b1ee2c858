"""Is calibrated SRJF faster than SGLang's own policies on live traffic that shares prefixes?

    python benchmarks/live_policy/run.py [--quick] [--json PATH]

The paper's WL1, scaled by 10, over HTTP: all requests at once, and Poisson arrivals at 1x, 2x and 4x of what our engine
serves at once. See the README beside this file.
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
from benchmarks.harness.compare import SATURATION, Comparison, Rate
from benchmarks.harness.turns import Served

MODEL = "llama-small"
SCALE = 10
USERS, QUICK_USERS = 20, 3
LOADS = (1.0, 2.0, 4.0)  # of the reference's throughput with all submitted at once
# KV for two users: the longest profiles, each with a post.
KV_TOKENS = 2 * (17_000 + 150) // SCALE
OURS, PAPER = engines.OURS, engines.PAPER
# What order gains is the question, so that all rivals attend in one way; ../post_recommendation has the others.
REFERENCE = engines.REFERENCES[-1]
FCFS, *RIVALS = (engines.stock(policy).on(REFERENCE) for policy in ("fcfs", "lpm", "dfs-weight"))


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_users, loads = (QUICK_USERS, LOADS[1:2]) if arguments.quick else (USERS, LOADS)
    served = Served(
        MODEL,
        ["--context-length", "4096", "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
        ["--max-input-length", "2048", *shapes.budget(3)],
    )

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.post_recommendation(rate, "single", SCALE, n_users=n_users)

    with Comparison(arguments, requests_of, served) as comparison:
        comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE}
        x = comparison.saturation_of(OURS)
        rates = [SATURATION, *(load * x for load in loads)]
        found = {
            engine: [run.figures for run in comparison.measure(engine, rates)]
            for engine in (OURS, PAPER, *reversed(RIVALS), FCFS)
        }
    shown = ["all at once", *(f"{load:g}x" for load in loads)]
    comparison.finish(
        [
            target
            for index, name in enumerate(shown)
            for target in targets_at(name, {one: found[one][index] for one in found})
        ]
    )
    return 0


def targets_at(load: str, of: dict[engines.Engine, Figures]) -> list[report.Target]:
    best_mean = min(of[rival].mean_s for rival in RIVALS)
    best_p99 = min(of[rival].p99_s for rival in RIVALS)
    return [
        report.Target.at_least(f"{load}: mean, fcfs / ours, --paper", of[FCFS].mean_s / of[PAPER].mean_s, 4),
        report.Target.at_least(f"{load}: mean, best of lpm and dfs-weight / ours", best_mean / of[OURS].mean_s, 1.2),
        report.Target.at_most(f"{load}: P99, ours, --paper / fcfs", of[PAPER].p99_s / of[FCFS].p99_s, 1.0),
        report.Target.at_most(f"{load}: P99, ours / best of lpm and dfs-weight", of[OURS].p99_s / best_p99, 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
