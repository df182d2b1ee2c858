"""What can one client do to others, and what do kills and nonsense do to the server?

    python benchmarks/storm/run.py [--quick] [--json PATH]

See the README beside this. A part that was measured is kept beside the result until all are: a run that is cut off goes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.harness.kept import Kept
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
    conditions = report.conditions()
    kept = Kept(arguments.json, conditions["command"])  # of each part its own commit is kept
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = part.write_model(folder / "model")
        for one, measure in PARTS.items():
            if one not in kept:
                print(f"== {one}", file=sys.stderr)
                (folder / one).mkdir()
                found = measure(arguments.quick, model, folder / one)
                kept[one] = {**found._asdict(), "commit": conditions["commit"]}
    parts = [kept[one] for one in PARTS]
    conditions["commit_of"] = {one: kept[one]["commit"] for one in PARTS}
    conditions["commands"] = {name: command for kept_part in parts for name, command in kept_part["commands"].items()}
    rows = [row for kept_part in parts for row in kept_part["rows"]]
    targets = [report.Target(*target) for kept_part in parts for target in kept_part["targets"]]
    report.finish({"conditions": conditions, "rows": rows}, targets, arguments.json)
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
