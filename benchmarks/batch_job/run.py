"""Is a job that is known ahead answered faster by `sgl_prefill.batch` than by sending its rows to a server?

    python benchmarks/batch_job/run.py [--quick] [--json PATH]

The paper's microbenchmarks, divided by 10, against both versions of SGLang, as shuffled and as sorted files. See the README
beside this.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import orjson

from benchmarks import report, shapes
from benchmarks.batch_job.workloads import MICRO, Micro, Rows
from benchmarks.harness import client, engines
from benchmarks.harness.turns import Contest, Served, Servers, of_reference, take_turns
from sgl_prefill.errors import ServerStartError

MODEL = "llama-small"
KV_TOKENS = 4000
POLICIES = tuple(engines.stock(policy) for policy in ("fcfs", "lpm", "dfs-weight"))
NEWER = tuple(engines.newer(policy) for policy in ("fcfs", "lpm", "shortest-prefill-first"))
JOB = engines.Engine("batch job", "sgl_prefill.batch")
QUICK = (Micro(60, 10, 4, 24),)


class Ran(NamedTuple):
    """One workload on one engine."""

    rows_per_s: float
    cached_share: float  # of all prompt tokens
    logprobs: list[list[float]]  # in the order of the file


Measured = dict[tuple[str, bool], Ran]  # by workload, and whether its file was sorted


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = report.conditions() | {"model": MODEL, "kv_tokens": KV_TOKENS}
    workloads: Sequence[Micro] = QUICK if arguments.quick else MICRO
    served = Served(
        MODEL,
        ["--context-length", "4096", "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
        ["--max-input-length", "2048", *shapes.budget(3)],
    )
    contest = Contest(POLICIES, 3, (JOB,), others=NEWER)
    if arguments.quick:
        contest = contest.smoke()
    rows: list[dict[str, Any]] = []
    first: Measured = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, Servers(served, 2) as servers:

        def measure(engine: engines.Engine, turn: str) -> Measured | None:
            try:
                found = measure_all(engine, workloads, servers, served, Path(folder))
            except Exception as error:
                why = servers.why_failed(engine, error)
                if why is None or engine == JOB:
                    raise
                failed[engine.name] = why
                return None
            for (name, is_sorted), ran in found.items():
                one = first.setdefault((name, is_sorted), ran)
                client.check_agreement(ran.logprobs, one.logprobs, engine.max_logprob_difference, engine.name)
                rows.append(
                    {
                        "engine": engine.name,
                        "turn": turn,
                        "workload": name,
                        "file": "sorted" if is_sorted else "shuffled",
                        "rows_per_s": ran.rows_per_s,
                        "cached_share": ran.cached_share,
                        "told_apart": client.told_apart(ran.logprobs, engine.max_logprob_difference),
                    }
                )
            return found

        def slowness(found: Measured) -> float:
            return sum(1 / ran.rows_per_s for (_, is_sorted), ran in found.items() if not is_sorted)

        found = take_turns(contest, measure, slowness)
    report.finish(
        {"conditions": conditions, "rows": rows, "failed": failed}, targets_of(workloads, found), arguments.json
    )
    return 0


def targets_of(workloads: Sequence[Micro], found: dict[engines.Engine, list[Measured]]) -> list[report.Target]:
    def rate(engine: engines.Engine, workload: Micro, is_sorted: bool) -> float:
        return statistics.median(run[workload.name, is_sorted].rows_per_s for run in found[engine])

    targets = []
    for workload in workloads:
        saved = min(run[workload.name, False].cached_share for run in found[JOB])
        targets.append(
            report.Target.at_least(f"{workload.name}: tokens saved / ceiling", saved / workload.ceiling, 0.999)
        )
        for reference, of_shuffled, of_sorted in (
            (engines.AS_SHIPPED, 3.0, None),
            (engines.PYTORCH_PATH, 1.5, 1.3),
            (engines.NEW_KERNEL, 1.5, 1.3),
        ):
            if (best := of_reference(found, reference)) is None:
                continue
            for is_sorted, limit in ((False, of_shuffled), (True, of_sorted)):
                if limit is not None:
                    ratio = rate(JOB, workload, False) / rate(best, workload, is_sorted)
                    how = "sorted" if is_sorted else "shuffled"
                    name = (
                        f"{workload.name}: rows a second, batch job / best stock policy, {reference.name}, file {how}"
                    )
                    targets.append(report.Target.at_least(name, ratio, limit))
    return targets


def measure_all(
    engine: engines.Engine, workloads: Sequence[Micro], servers: Servers, served: Served, folder: Path
) -> Measured:
    found: Measured = {}
    for workload in workloads:
        rows = workload.rows()
        if engine == JOB:
            found[workload.name, False] = run_job(rows, servers.model_folder, served, folder)
            continue
        for is_sorted in (False, True):
            order = sorted(range(len(rows)), key=rows.__getitem__) if is_sorted else range(len(rows))
            server = servers.of(engine)
            server.flush_cache()
            ran = run_server(server.url, [rows[row] for row in order], f"{engine.name}, {workload.name}")
            logprobs = dict(zip(order, ran.logprobs, strict=True))
            found[workload.name, is_sorted] = ran._replace(logprobs=[logprobs[row] for row in range(len(rows))])
    return found


def run_server(url: str, rows: Rows, name: str) -> Ran:
    """All rows at once: what a user of a batch file who has a server would do."""
    outcomes = client.run(url, [client.Due(0.0, row) for row in rows], name)
    figures = client.figures(outcomes)
    return Ran(figures.requests_per_s, figures.cached_share, [one.logprobs for one in outcomes])


def run_job(rows: Rows, model: Path, served: Served, folder: Path) -> Ran:
    """A process of its own. Its time is that from the first row read to the last answer on disk, without the start of the
    engine, as a server's start does not count either."""
    job, output = folder / "job.jsonl", folder / "answers.jsonl"
    with job.open("wb") as file:
        for number, row in enumerate(rows):
            body = {"input_ids": row, "allowed_token_ids": client.LABEL_IDS}
            file.write(orjson.dumps({"custom_id": str(number), "url": "/generate", "body": body}) + b"\n")
    command = [
        *(sys.executable, "-m", JOB.module, "-i", str(job), "-o", str(output), "--overwrite"),
        *shapes.weight_flags(model, shapes.DTYPE),
        *served.flags_of_all,
        *served.flags_of_ours,
    ]
    done = subprocess.run(
        command, env={**os.environ, **engines.QUIET}, cwd=report.REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ServerStartError(f"the batch job ended with {done.returncode}: {done.stderr[-2000:]}")
    summary = json.loads((folder / "answers.jsonl.job" / "summary.json").read_text())
    logprobs = {}
    for line in output.read_bytes().splitlines():
        answer = orjson.loads(line)
        labels = answer["response"]["body"]["meta_info"]["label_scores"]["labels"]
        logprobs[int(answer["custom_id"])] = [label["logprob"] for label in labels]
    taken_s = summary["plan_s"] + summary["answer_s"]
    return Ran(
        len(rows) / taken_s,
        summary["cached_tokens"] / summary["prompt_tokens"],
        [logprobs[number] for number in range(len(rows))],
    )


if __name__ == "__main__":
    sys.exit(main())
