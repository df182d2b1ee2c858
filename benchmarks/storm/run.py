"""What can one client do to others, and what do kills and nonsense do to the server?

    python benchmarks/storm/run.py [--quick] [--json PATH]       # BENCH_PARTS="soak cost": these alone

See the README beside this.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.storm import cost, fuzz, hostile, kills, mixed, neighbours, part, soak, tenants


def measured(measure: Callable[[bool, Path, Path], part.Part], quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = measure(quick, part.write_model(Path(folder) / "model"), Path(folder))
    return report.part(found.rows, found.targets, commands=found.commands)


MODULES = (fuzz, mixed, kills, soak, neighbours, tenants, cost, hostile)
PARTS = {one.__name__.rpartition(".")[2]: functools.partial(measured, one.measure) for one in MODULES}
PARTS["bodies"] = functools.partial(measured, neighbours.measure_bodies)

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
