"""Whole jobs: how fast, at what cost of planning, answered once in spite of kills, and beside live requests.

    python benchmarks/batch/run.py [--quick] [--json PATH]       # BENCH_PARTS="plan": this alone

BatchLLM's workloads, divided. See the README beside this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.batch import background, kills, plan, whole

PARTS = {
    "whole": whole.measure,
    "decode": whole.measure_decode,
    "attention": whole.measure_attention,
    "plan": plan.measure,
    "kills": kills.measure,
    "background": background.measure,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
