"""What do labels of any length cost, and what do calibration and reranking do?

    python benchmarks/answers/run.py [--quick] [--json PATH]       # BENCH_PARTS="labels rerank": these alone

See the README beside this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.answers import calibration, labels

PARTS = {"labels": labels.measure, "calibration": calibration.measure, "rerank": labels.measure_rerank}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
