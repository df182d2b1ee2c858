"""How many of the paper's WL2 requests, long and sharing nothing, does each engine serve in a second?

    python benchmarks/credit_verification/run.py [--quick] [--json PATH]

Unscaled on a GPU, all lengths divided by 10 without one. See the README beside this file.
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
from benchmarks.harness.compare import SATURATION, Comparison, Rate
from benchmarks.harness.turns import MANY, Contest, Served, of_reference

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
LONGEST_TOKENS = 61_000 // SCALE
# A device is lent for minutes.
LOADS = (1.0,) if shapes.HAS_CUDA else (0.5, 1.0, 2.0)
USERS, QUICK_USERS = 12 if shapes.HAS_CUDA else 40, 4
ABLATIONS = (
    engines.ours("ours, hybrid off", "--hybrid-prefill", "off"),
    engines.ours("ours, KV kept", "--suffix-kv", "keep"),
)
CONTEST = Contest(
    (
        engines.stock("fcfs"),
        engines.stock("fcfs", "--chunked-prefill-size", "-1")._replace(name="stock fcfs, unchunked"),
        engines.stock("shortest-prefill-first"),
    ),
    n_turns=1 if shapes.HAS_CUDA else 3,
)
AT_LEAST = 1.2 if shapes.HAS_CUDA else 2.2  # times the throughput of the best setting


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    n_users = QUICK_USERS if arguments.quick else USERS
    served = Served(
        MODEL,
        ["--context-length", str(2 * LONGEST_TOKENS), "--max-running-requests", "8"],
        ["--max-input-length", str(LONGEST_TOKENS), *shapes.budget(4)],
    )

    def requests_of(rate: Rate) -> list[Due]:
        return traffic.credit_verification(rate, SCALE, n_users=n_users)

    contest = CONTEST.smoke() if arguments.quick else CONTEST
    with Comparison(arguments, requests_of, served, n_servers=MANY) as comparison:
        comparison.conditions |= {"scaled_by": SCALE}
        found = comparison.take_turns(contest, [SATURATION], cost=lambda one: -one.requests_per_s)
        per_s = {engine: figures.requests_per_s for engine, (figures,) in found.items()}
        comparison.conditions["x_requests_per_s"] = per_s[engines.OURS]
        if not arguments.quick:
            for engine in found:
                comparison.measure(engine, [load * per_s[engines.OURS] for load in LOADS])
            for engine in ABLATIONS:
                comparison.measure(engine, [SATURATION])
    targets = []
    for engine in contest.ours:
        for reference in engines.REFERENCES:
            if (best := of_reference(found, reference)) is not None:
                name = f"WL2, throughput, {engine.name} / the best stock setting, {reference.name}"
                targets.append(report.Target.at_least(name, per_s[engine] / per_s[best], AT_LEAST))
    comparison.finish(targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
