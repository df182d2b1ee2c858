"""What does a step gain that is launched while another runs, and does it stay exact?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import report

STEPS, QUICK_STEPS = 400, 30
PROMPTS, QUICK_PROMPTS = 15_000, 300
NO_WAIT_MS = 0.1


def in_child(part: str, number: int) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.loop.ahead_child", part, scratch, str(number)]
        done = subprocess.run(command, cwd=report.REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_wait(is_quick: bool) -> dict[str, Any]:
    rows = in_child("wait", QUICK_STEPS if is_quick else STEPS)
    after = {row["step_ms"]: row["wait_p50_ms"] for row in rows if row["launched"] == "after the result"}
    targets = [
        report.Target.at_most(
            f"steps of {row['step_ms']} ms: ms that a device waits for its host", row["wait_p50_ms"], NO_WAIT_MS
        )
        for row in rows
        # The host's work on a step, which a device waits for where each result is awaited.
        if row["launched"] == "while one runs" and row["step_ms"] > after[row["step_ms"]]
    ]
    return report.part(rows, targets)


def measure_late(is_quick: bool) -> dict[str, Any]:
    found = in_child("late", QUICK_PROMPTS if is_quick else PROMPTS)
    order, storms = found["order"], found["storm"]
    targets = [
        report.Target.at_most(
            f"requests whose order or cached tokens differ, of {order['requests']}", order["differ"], 0
        ),
        report.Target.at_most("storm: unanswered", sum(one["unanswered"] for one in storms), 0),
        report.Target.at_most("storm: not a number", sum(one["not_a_number"] for one in storms), 0),
        report.Target.at_most(
            "storm: largest difference of a log-probability", max(one["worst"] for one in storms), 1e-4
        ),
    ]
    return report.part([{"what": "order", **order}, *({"what": "storm", **one} for one in storms)], targets)
