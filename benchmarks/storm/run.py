"""What can one client do to others, and what does nonsense do to the server?

    python benchmarks/storm/run.py [--quick] [--json PATH]       # BENCH_PARTS="soak cost": these alone

See the README beside this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.storm import cost, fuzz, neighbours, soak, tenants

MODULES = (fuzz, soak, neighbours, tenants, cost)
PARTS = {one.__name__.rpartition(".")[2]: one.measure for one in MODULES} | {"bodies": neighbours.measure_bodies}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
