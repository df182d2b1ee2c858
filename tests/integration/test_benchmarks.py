"""The comparison harness against real servers, short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import engines

ROOT = Path(__file__).resolve().parents[2]
# A benchmark refuses to count ours without the kernel, unless that was asked for; these also run where nothing can build it.
WITHOUT_KERNEL = {**os.environ, engines.KERNEL_VARIABLE: "off"}
OURS, STOCK = engines.OURS.name, engines.stock("fcfs").on(engines.PYTORCH_PATH).name


def test_ours_and_stock_are_compared_and_agree(tmp_path: Path) -> None:
    """12 requests to each of two servers: the run refuses log-probabilities that differ, and a stock server that is ours."""
    command = [sys.executable, "benchmarks/short_mix/run.py", "--quick", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=WITHOUT_KERNEL)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert {row["engine"]: row["requests"] for row in result["rows"]} == {OURS: 12, STOCK: 12}
    assert min(row["told_apart"] for row in result["rows"]) > 0.5
    records = result["activation_records"]
    assert records[OURS]["hooks"]
    assert records[STOCK] is None
