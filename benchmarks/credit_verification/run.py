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
from benchmarks.harness.compare import SATURATION, Comparison, Rate, Served

MODEL, SCALE = (shapes.DEVICE_MODEL, 1) if shapes.HAS_CUDA else ("llama-small", 10)
LONGEST_TOKENS = 61_000 // SCALE
# A device is lent for minutes.
LOADS = (1.0,) if shapes.HAS_CUDA else (0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
USERS, QUICK_USERS = 12 if shapes.HAS_CUDA else 60, 4
OURS = engines.ours("ours")
ABLATIONS = (
    engines.ours("ours, hybrid off", "--hybrid-prefill", "off"),
    engines.ours("ours, KV kept", "--suffix-kv", "keep"),
)
DEFAULT = engines.stock("fcfs")
UNCHUNKED = engines.stock("fcfs", "--chunked-prefill-size", "-1")._replace(name="stock fcfs, unchunked")


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

    with Comparison(arguments, requests_of, served) as comparison:
        comparison.conditions |= {"scaled_by": SCALE}
        x = comparison.saturation_of(OURS)
        rates = [] if arguments.quick else [load * x for load in LOADS]
        comparison.measure(OURS, rates)
        for engine in () if arguments.quick else ABLATIONS:
            comparison.measure(engine, [SATURATION])
        stock = [comparison.measure_rival(DEFAULT, [SATURATION, *rates])]
        for rival in () if arguments.quick else (UNCHUNKED, engines.newer("shortest-prefill-first")):
            stock.append(comparison.measure_rival(rival, [SATURATION]))
    best = max(runs[0].figures.requests_per_s for runs in stock if runs is not None)
    comparison.finish([report.Target.at_least("WL2, throughput, ours / the best stock setting", x / best, 1.2)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
