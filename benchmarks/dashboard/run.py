"""What does the dashboard cost, are its numbers true, and what does a start print?

    python benchmarks/dashboard/run.py [--quick] [--json PATH]

See the README beside this. The result is written after each part; BENCH_PARTS="open start" measures these alone, and takes the
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
from benchmarks.dashboard import open_page, snapshots, start_lines

PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "snapshot": snapshots.measure,
    "open": open_page.measure,
    "start": start_lines.measure,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
