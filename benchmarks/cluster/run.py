"""What is it worth to send a user's requests to one engine, what does the gateway cost, and what is lost with an engine?

    python benchmarks/cluster/run.py [--quick] [--json PATH]

See the README beside this. The result is written after each part; BENCH_PARTS="gateway kills" measures these alone, and takes the
others from the result that is there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each of two engines has a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.cluster import live

PARTS: dict[str, Callable[[live.Engines, bool], live.Part]] = {
    "routing": live.routing,
    "heavy_user": live.heavy_user,
    "gateway": live.gateway_cost,
    "kills": live.kills,
}


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    asked = os.environ.get("BENCH_PARTS", "").split() or list(PARTS)
    conditions = report.conditions()
    conditions["commit_of"] = {}
    parts: dict[str, Any] = {}
    if os.environ.get("BENCH_PARTS") and arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        parts, conditions["commit_of"] = kept["parts"], kept["conditions"]["commit_of"]
        conditions["commands"] = kept["conditions"].get("commands", {})
    with tempfile.TemporaryDirectory() as name, live.Engines(Path(name)) as engines:
        for part in asked:
            print(f"== {part}", file=sys.stderr)
            found = PARTS[part](engines, arguments.quick)
            parts[part] = {"rows": found.rows, "targets": [target._asdict() for target in found.targets]}
            conditions["commit_of"][part] = conditions["commit"]
            conditions["commands"] = {**conditions.get("commands", {}), **engines.commands}
            write({one: parts[one] for one in PARTS if one in parts}, conditions, arguments.json)
    return 0


def write(parts: dict[str, Any], conditions: dict[str, Any], path: Path | None) -> None:
    targets = [report.Target(**target) for part in parts.values() for target in part["targets"]]
    report.finish({"conditions": dict(conditions), "parts": parts}, targets, path)


if __name__ == "__main__":
    sys.exit(main())
