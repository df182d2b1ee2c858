"""What happens between two steps: the policy's cost, the gap between two passes, steps launched ahead, SGLang's overlap loop.

    python benchmarks/loop/run.py [--quick] [--json PATH]       # BENCH_PARTS="policy gaps": these alone

See the README beside this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.loop import ahead, gaps, overlap, policy

PARTS = {
    "gaps": gaps.measure,
    "policy": policy.measure_steps,
    "wait": ahead.measure_wait,
    "late": ahead.measure_late,
    "overlap": overlap.measure,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
