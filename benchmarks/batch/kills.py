"""Is a job that is killed at random moments answered as one that is not?"""

from __future__ import annotations

import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import report, shapes
from benchmarks.batch import job as batch_job
from benchmarks.batch.workloads import Micro

MODEL = "llama-small"
N_ROWS, N_KILLS = 5_000, 20
START_S = 20
SAME = 1e-4  # float32: sums in steps of other rows differ in their last bits, some 1e-6 of log-probabilities near -11


def measure(quick: bool) -> dict[str, Any]:
    n_rows, n_kills = (64, 1) if quick else (N_ROWS, N_KILLS)
    rows = Micro(200, 20, 16, n_rows).rows()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.write(MODEL, folder / "model")
        shapes.write_weights(folder / "model")
        job = folder / "job.jsonl"
        batch_job.write(rows, job)
        whole = folder / "whole.jsonl"
        began_s = time.monotonic()
        run(job, whole, folder).wait()
        whole_s = time.monotonic() - began_s
        kills, killed = run_with_kills(job, folder / "killed.jsonl", folder, n_kills)
        expected, found = batch_job.answers_of(whole), batch_job.answers_of(killed)
    counts = Counter(number for number, _ in found)
    by_id, expected_by_id = dict(found), dict(expected)
    differences = {one: max(abs(a - b) for a, b in zip(by_id[one], expected_by_id[one], strict=True)) for one in by_id}
    differing = sum(difference > SAME for difference in differences.values())
    targets = [
        report.Target.at_most("rows lost", len(expected_by_id.keys() - by_id.keys()), 0),
        report.Target.at_most("rows answered twice", sum(n > 1 for n in counts.values()), 0),
        report.Target.at_most("rows answered otherwise than without kills", differing, 0),
    ]
    if len(expected) != len(rows):
        raise report.InvalidRunError(f"the job that was not killed answered {len(expected)} of {len(rows)} rows")
    of_run = {"kills": kills, "whole_s": whole_s, "largest_difference": max(differences.values())}
    return report.part([], targets, conditions={"model": MODEL, "dtype": "float32"}, **of_run)


def run(job: Path, output: Path, folder: Path) -> subprocess.Popen[bytes]:
    flags = [
        *shapes.weight_flags(folder / "model", "float32"),
        *("--context-length", "4096", "--max-total-tokens", "4000", "--max-input-length", "2048", *shapes.budget(3)),
        "--set",
        "skip_parity_gate=true",
    ]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(batch_job.command_of(job, output, flags), cwd=report.REPOSITORY, stdout=log, stderr=log)


def run_with_kills(job: Path, output: Path, folder: Path, n_kills: int) -> tuple[list[dict[str, Any]], Path]:
    """Kills the job at moments that are spread over its answers, every fifth time while it starts, tokenises or plans."""
    rng = random.Random(0)
    n_rows = sum(1 for _ in job.open("rb"))
    moments = sorted(rng.random() for _ in range(n_kills))
    kills = []
    for number, moment in enumerate(moments):
        process = run(job, output, folder)
        if number % 5 == 4:
            time.sleep(rng.uniform(0, START_S))
        else:
            while process.poll() is None and n_lines(output) < moment * n_rows:
                time.sleep(0.005)
            time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        status = process.wait()
        torn = output.read_bytes().rpartition(b"\n")[2] if output.exists() else b""
        kills.append({"answered": n_lines(output), "torn_bytes": len(torn), "status": status})
    last = run(job, output, folder)
    if last.wait() != 0:
        raise report.InvalidRunError(
            f"the last run ended with {last.returncode}: {(folder / 'log.txt').read_text()[-2000:]}"
        )
    return kills, output


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
