"""How far from float32 are label log-probabilities: of each engine in bfloat16, and with INT8 weights?

    python benchmarks/exactness/run.py [--quick] [--json PATH]       # BENCH_PARTS="int8": this alone

See the README beside this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.exactness import engines_bf16, int8

PARTS = {"engines": engines_bf16.measure, "int8": int8.measure}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
