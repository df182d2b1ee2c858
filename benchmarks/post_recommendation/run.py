"""How much more traffic of the paper's WL1 does each engine carry, and at what latency (Figs. 6, 7 and 9)?

    python benchmarks/post_recommendation/run.py [--quick] [--json PATH]

Unscaled on a GPU, all lengths divided by 10 without one. See the README beside this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.harness import engines, traffic
from benchmarks.harness.client import Due
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Run, Served

MODEL, SCALE = ("llama-3.1-8b", 1) if shapes.HAS_CUDA else ("llama-small", 10)
QUICK_USERS = 3
KV_TOKENS = 2 * (17_000 + 150) // SCALE  # of two users
LOADS = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
# An engine's latency far beyond what it serves is the length of the run, whatever it is.
FURTHEST_LOAD = 2.0
STEPS_OF_CAPACITY = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
MAX_LOGPROB_DIFFERENCE = 0.25  # bfloat16, in steps of other sizes
UNCHUNKED = ("--chunked-prefill-size", "-1")
# lambda counts tokens, which are divided by SCALE too.
ONE = engines.ours("ours, one a step", "--fairness-lambda", str(500 / SCALE))
PACKED = engines.ours(
    "ours, packed", "--pack-step-tokens", "auto", "--sharers", "count", "--fairness-lambda", str(20 / SCALE)
)
ABLATIONS = (
    *(
        engines.ours(f"ours, one a step, {name}", "--fairness-lambda", str(500 / SCALE), *flags)
        for name, flags in (
            ("hybrid off", ("--hybrid-prefill", "off")),
            ("KV kept", ("--suffix-kv", "keep")),
            ("cache-miss JCT", ("--jct-model", "cache-miss")),
        )
    ),
    engines.ours("ours, stock scheduling", "--scheduling", "stock"),
)
DEFAULT = engines.stock("fcfs")
AS_SHIPPED = engines.stock("fcfs", "--attention-backend", "torch_native")._replace(name="stock fcfs, torch_native")


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_users = QUICK_USERS if arguments.quick else 20

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.post_recommendation(rate, "single", SCALE, n_users=n_users)

    served = Served(
        MODEL,
        [
            *("--context-length", str(40_960 // SCALE)),
            *("--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"),
        ],
        ["--max-input-length", str(20_480 // SCALE), *shapes.budget(3)],
    )
    with Comparison(arguments, requests_of, served, MAX_LOGPROB_DIFFERENCE) as comparison:
        comparison.conditions |= {"kv_tokens": KV_TOKENS, "scaled_by": SCALE}
        (first,) = comparison.measure(ONE, [SATURATION])
        x = comparison.conditions["x_requests_per_s"] = first.figures.requests_per_s
        rivals = [engines.stock("dfs-weight"), engines.stock("lpm"), *newer()]
        if arguments.quick:
            rivals = rivals[:1]
        carried = {
            engine.name: curve(comparison, engine, x) for engine in (*([] if arguments.quick else [DEFAULT]), *rivals)
        }
        capacities = [
            {"engine": ours.name, "rival": rival, **capacity(comparison, ours, limit)}
            for ours in (ONE, PACKED)
            for rival, limit in carried.items()
        ]
        for ours in (ONE, PACKED):
            comparison.measure(ours, [load * x for load in (LOADS if not arguments.quick else LOADS[2:3])])
        for engine in () if arguments.quick else (*ABLATIONS, *without_curves()):
            comparison.measure(engine, [SATURATION])
    comparison.finish(targets_of(capacities), capacities=capacities)
    return 0


def newer() -> list[engines.Engine]:
    return [engine for policy in ("shortest-prefill-first", "hrrn", "lpm") for engine in engines.newer(policy)]


def without_curves() -> list[engines.Engine]:
    """Settings of stock SGLang that are shown with all submitted at once only."""
    unchunked = [engines.stock(policy, *UNCHUNKED) for policy in ("fcfs", "dfs-weight")]
    named = [engine._replace(name=f"{engine.name}, unchunked") for engine in unchunked]
    return [*named, *([] if shapes.HAS_CUDA else [AS_SHIPPED])]


def curve(comparison: Comparison, engine: engines.Engine, x: float) -> Run:
    """Latency against load, up to twice what the engine serves; its run at exactly what it serves is returned."""
    (at_once,) = comparison.measure(engine, [SATURATION])
    own = at_once.figures.requests_per_s
    comparison.measure(engine, [load * x for load in LOADS if load * x <= FURTHEST_LOAD * own])
    (at_own,) = comparison.measure(engine, [own])
    return at_own


def capacity(comparison: Comparison, engine: engines.Engine, limit: Run) -> dict[str, Any]:
    """The highest rate at which mean and P99 stay within those of a rival at its own saturation."""
    assert limit.offered_per_s is not None
    held = None
    for step in STEPS_OF_CAPACITY:
        (run,) = comparison.measure(engine, [step * limit.offered_per_s])
        if run.figures.mean_s > limit.figures.mean_s or run.figures.p99_s > limit.figures.p99_s:
            break
        held = step
    return {"rival_per_s": limit.offered_per_s, "times": held}


def targets_of(capacities: list[dict[str, Any]]) -> list[report.Target]:
    """A rate that was not held at all counts as 0."""
    targets = []
    for ours in (PACKED.name, ONE.name):
        of_engine = [row for row in capacities if row["engine"] == ours]
        for rival, target in ((DEFAULT.name, 4.0), (None, 1.3)):
            rows = [row for row in of_engine if (row["rival"] == rival if rival else row["rival"] != DEFAULT.name)]
            if rows:
                times = min(row["times"] or 0.0 for row in rows)
                shown = rival or "the best policy of either version"
                targets.append(report.Target.at_least(f"WL1, load carried, {ours} / {shown}", times, target))
    return targets


if __name__ == "__main__":
    sys.exit(main())
