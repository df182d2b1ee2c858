"""The comparison harness against a real server: the benchmark that needs only one, short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_benchmark_runs_and_the_long_request_waits_no_longer_than_its_bound() -> None:
    """Not a measurement: the stream lasts 12 seconds. The run refuses lost requests and answers that are all alike."""
    command = [sys.executable, "benchmarks/long_among_short/run.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the long request's time in the queue, ours, one a step" in done.stdout
