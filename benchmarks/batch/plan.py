"""What does planning a whole job cost, and what do one level of prefixes and all levels save? No model: plans alone."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.batch.single_level import single_level
from benchmarks.batch.workloads import industry
from sgl_prefill.core.batch import batch_plan
from sgl_prefill.core.batch.token_rows import TokenRows

INDUSTRY_ROWS, LARGE_ROWS, LARGE_TOKENS, DEGREE = 8_000, 1_000_000, 200, 16
REPEATS = 5


def measure(quick: bool) -> dict[str, Any]:
    n_industry, n_large = (400, 5_000) if quick else (INDUSTRY_ROWS, LARGE_ROWS)
    of_industry = plan_industry(n_industry)
    large = in_child(n_large)
    targets = [
        report.Target.at_most(f"planning {n_industry} rows of the industry workload, s", of_industry["plan_s"], 0.5),
        report.Target.at_most(f"planning {n_large} rows of {LARGE_TOKENS} tokens, s", large["plan_s"], 60.0),
        report.Target.at_most("the same: peak memory of the process, GB", large["peak_gb"], 2.0),
        report.Target.at_most(
            "industry workload: share of tokens that one level saves less than all levels",
            of_industry["all_levels_saved"] - of_industry["one_level_saved"],
            0.01,
        ),
    ]
    return report.part([], targets, industry=of_industry, large=large)


def plan_industry(n_rows: int) -> dict[str, Any]:
    """The paper's lengths, undivided."""
    rows = TokenRows.of(industry(n_rows, divided_by=1))
    n_tokens = int(rows.lengths.sum())
    taken_s = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        all_levels = batch_plan.depth_first(rows)
        taken_s.append(time.perf_counter() - began_s)
    began_s = time.perf_counter()
    one_level = single_level(rows)
    return {
        "rows": n_rows,
        "tokens": n_tokens,
        "plan_s": statistics.median(taken_s),
        "one_level_plan_s": time.perf_counter() - began_s,
        "all_levels_saved": all_levels.saved_tokens / n_tokens,
        "one_level_saved": one_level.saved_tokens / n_tokens,
    }


def in_child(n_rows: int) -> dict[str, Any]:
    """In a process of its own, whose memory is the plan's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, str(n_rows), folder]
        done = subprocess.run(command, cwd=report.REPOSITORY, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plan_large(n_rows: int, folder: Path) -> dict[str, Any]:
    """Shuffled rows whose first half is shared by `DEGREE` of them; tokens in a file, as a job has them."""
    rng = np.random.default_rng(0)
    path = folder / "tokens.bin"
    n_shared = LARGE_TOKENS // 2
    tokens = np.memmap(path, np.int32, "w+", shape=(n_rows, LARGE_TOKENS))
    group_of = rng.permutation(n_rows) // DEGREE
    at_once = 50_000
    for first in range(0, n_rows, at_once):
        groups = group_of[first : first + at_once]
        shared = (groups[:, None] * 1_000_003 + np.arange(n_shared) * 7_919) % 48_000
        own = rng.integers(0, 48_000, (len(groups), LARGE_TOKENS - n_shared))
        tokens[first : first + at_once] = np.concatenate([shared, own], axis=1)
    tokens.flush()
    del tokens
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = TokenRows.one_after_the_other(np.memmap(path, np.int32, "r"), np.full(n_rows, LARGE_TOKENS, np.int64))
    began_s = time.perf_counter()
    order = batch_plan.depth_first(rows)
    taken_s = time.perf_counter() - began_s
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": n_rows,
        "plan_s": taken_s,
        "peak_gb": peak_kb / 1e6,
        "peak_before_gb": before_kb / 1e6,
        "saved": order.saved_tokens / (n_rows * LARGE_TOKENS),
    }


if __name__ == "__main__":
    print(json.dumps(plan_large(int(sys.argv[1]), Path(sys.argv[2]))))
