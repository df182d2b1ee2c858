"""What do labels of any length cost, are their probabilities right, and what do calibration, reranking, cutting and stability do?

    python benchmarks/answers/run.py [--quick] [--json PATH]

See the README beside this. The result is written after each part; BENCH_PARTS="labels rerank" measures these alone, and takes the
others from the result that is there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.answers import calibration, labels, rerank, stable, truncation

PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "labels": labels.measure,
    "calibration": calibration.measure,
    "rerank": rerank.measure,
    "truncation": truncation.measure,
    "stable": stable.measure,
}


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    asked = os.environ.get("BENCH_PARTS", "").split() or list(PARTS)
    conditions = report.conditions() | {"commit_of": {}}
    parts: dict[str, Any] = {}
    if os.environ.get("BENCH_PARTS") and arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        parts, conditions["commit_of"] = kept["parts"], kept["conditions"]["commit_of"]
    for part in asked:
        print(f"== {part}", file=sys.stderr)
        parts[part] = PARTS[part](arguments.quick)
        conditions["commit_of"][part] = conditions["commit"]
        in_order = {one: parts[one] for one in PARTS if one in parts}
        targets = [report.Target(**target) for one in in_order.values() for target in one["targets"]]
        report.finish({"conditions": dict(conditions), "parts": in_order}, targets, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
