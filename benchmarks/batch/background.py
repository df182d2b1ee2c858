"""What do live requests feel of a job in the background, and how much does the job get done meanwhile?"""

from __future__ import annotations

import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report, shapes
from benchmarks.batch import job as batch_job
from benchmarks.batch.workloads import Micro
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Served, Servers

MODEL = "llama-small"
KV_TOKENS = 4000
TURNS, LIVE_REQUESTS, LIVE_PER_S = 3, 300, 5.0
LIVE_PREFIX_TOKENS, LIVE_OWN_TOKENS = 200, 50
OUTPUT = "out.jsonl"


def measure(quick: bool) -> dict[str, Any]:
    turns, n_live = (1, 10) if quick else (TURNS, LIVE_REQUESTS)
    workload: Micro = Micro(60, 10, 4, 24) if quick else Micro(200, 20, 16, 32_000)
    served = Served(
        MODEL,
        ["--context-length", "4096", "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
        ["--max-input-length", "2048", *shapes.budget(3)],
    )
    live = live_requests(n_live)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Servers(served, 1) as servers:
        folder = Path(name)
        batch_job.write(workload.rows(), folder / "job.jsonl")
        url = servers.of(engines.OURS).url
        for turn in range(turns):
            for what, flags in (("no job", None), ("background", ["--background"]), ("job, not in the background", [])):
                job = None if flags is None else start_job(url, folder, flags)
                if job is not None:
                    wait_for_answers(job, folder)
                began_s, n_before = time.monotonic(), n_answers(folder)
                outcomes = client.run(url, live, f"{what}, turn {turn + 1}")
                job_rows_per_s = (n_answers(folder) - n_before) / (time.monotonic() - began_s)
                if job is not None:
                    ran_on = job.poll() is None
                    job.terminate()
                    job.wait()
                    if not ran_on and not quick:
                        raise report.InvalidRunError("the job ended before the live requests did")
                figures = client.figures(outcomes)
                rows.append({"turn": turn + 1, "beside": what, **figures._asdict(), "job_rows_per_s": job_rows_per_s})

    def p99(what: str) -> float:
        return float(statistics.median(row["p99_s"] for row in rows if row["beside"] == what))

    targets = [
        report.Target.at_most("live requests: P99, background job / no job", p99("background") / p99("no job"), 1.5)
    ]
    return report.part(
        rows, targets, conditions={"model": MODEL, "kv_tokens": KV_TOKENS, "live_requests_per_s": LIVE_PER_S}
    )


def live_requests(n: int) -> list[client.Due]:
    """Prompts of ten users, as they come."""
    rng = random.Random("live")
    prefixes = [shapes.token_ids(rng, LIVE_PREFIX_TOKENS) for _ in range(10)]
    return [
        client.Due(at_s, [*rng.choice(prefixes), *shapes.token_ids(rng, LIVE_OWN_TOKENS)])
        for at_s in traffic.poisson(LIVE_PER_S, n)
    ]


def start_job(url: str, folder: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    (folder / OUTPUT).unlink(missing_ok=True)  # the wait for answers must not find the preceding turn's
    command = batch_job.command_of(folder / "job.jsonl", folder / OUTPUT, ["--base-url", url, "--overwrite", *flags])
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=report.REPOSITORY, stdout=log, stderr=log)


def n_answers(folder: Path) -> int:
    output = folder / OUTPUT
    return output.read_bytes().count(b"\n") if output.exists() else 0


def wait_for_answers(job: subprocess.Popen[bytes], folder: Path) -> None:
    """Until the job is under way."""
    output = folder / OUTPUT
    while not (output.exists() and output.stat().st_size):
        if job.poll() is not None:
            raise report.InvalidRunError(f"the job ended: {(folder / 'log.txt').read_text()[-1000:]}")
        time.sleep(0.05)
