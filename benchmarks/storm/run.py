"""What can one client do to others, and what do kills and nonsense do to the server?

    python benchmarks/storm/run.py [--quick] [--json PATH]

See the README beside this. The result is written after each part; BENCH_PARTS="soak cost" measures these alone, and takes the
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

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.storm import cost, fuzz, kills, mixed, neighbours, part, soak, tenants

PARTS: dict[str, Callable[[bool, Path, Path], part.Part]] = {
    "fuzz": fuzz.measure,
    "mixed": mixed.measure,
    "kills": kills.measure,
    "soak": soak.measure,
    "neighbours": neighbours.measure,
    "tenants": tenants.measure,
    "cost": cost.measure,
}


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    asked = os.environ.get("BENCH_PARTS", "").split()
    measured: dict[str, dict[str, Any]] = {}
    if asked and arguments.json.exists():
        measured = json.loads(arguments.json.read_text())["parts"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = part.write_model(folder / "model")
        for one in asked or PARTS:
            print(f"== {one}", file=sys.stderr)
            (folder / one).mkdir()
            conditions = report.conditions()
            found = PARTS[one](arguments.quick, model, folder / one)
            targets = [target._asdict() for target in found.targets]
            measured[one] = {**found._asdict(), "targets": targets, "commit": conditions["commit"]}
            write(measured, conditions, arguments.json)
    return 0


def write(measured: dict[str, dict[str, Any]], conditions: dict[str, Any], path: Path | None) -> None:
    """Writes what there is, in the order of the parts, and says what is missing."""
    parts = {one: measured[one] for one in PARTS if one in measured}
    conditions["not_measured"] = [one for one in PARTS if one not in measured]
    conditions["commands"] = {name: command for one in parts.values() for name, command in one["commands"].items()}
    conditions["commit_of"] = {name: one["commit"] for name, one in parts.items()}
    targets = [report.Target(**target) for one in parts.values() for target in one["targets"]]
    report.finish({"conditions": conditions, "parts": parts}, targets, path)


if __name__ == "__main__":
    sys.exit(main())
