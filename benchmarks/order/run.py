"""The order of the queue: which settings should be the default, and what bounds the wait of a long request among short ones?

    python benchmarks/order/run.py [--quick] [--json PATH]       # BENCH_PARTS="settings": this alone

See the README beside this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report
from benchmarks.order import long_request, settings

PARTS = {"settings": settings.measure, "long_request": long_request.measure}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
