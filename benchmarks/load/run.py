"""What latency does each engine keep at which load of the paper's two workloads (Figs. 6, 7, 9 and 11)?

    python benchmarks/load/run.py [--quick] [--json PATH]       # BENCH_PARTS="wl2 fairness": these alone

Unscaled on a GPU; without one the lengths are divided (the parts say by what). See the README beside this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.load import wl1, wl2

PARTS = {"wl1": wl1.load, "bursts": wl1.bursts, "fairness": wl1.fairness, "wl2": wl2.load}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
