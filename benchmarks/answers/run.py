"""What do labels of any length cost, and what do calibration, reranking and stability do?

    python benchmarks/answers/run.py [--quick] [--json PATH]

See the README beside this. The result is written after each part; BENCH_PARTS="labels rerank" measures these alone, and takes the
others from the result that is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.answers import calibration, labels, rerank, stable

PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "labels": labels.measure,
    "calibration": calibration.measure,
    "rerank": rerank.measure,
    "stable": stable.measure,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
