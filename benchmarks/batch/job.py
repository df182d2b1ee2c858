"""A batch job as its users run it: a file of requests, the command, the file of answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks import report
from benchmarks.batch.workloads import Rows
from benchmarks.harness import client, engines
from sgl_prefill.errors import ServerStartError

MODULE = "sgl_prefill.batch"


def write(rows: Rows, path: Path, n_new_tokens: int = 0) -> None:
    """Asks for the same as `client.run` does, row by row; its `custom_id` is a row's number."""
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            body = client.body_of(client.Due(0.0, row, n_new_tokens=n_new_tokens))
            file.write(orjson.dumps({"custom_id": str(number), "url": "/generate", "body": body}) + b"\n")


def command_of(job: Path, output: Path, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", MODULE, "-i", str(job), "-o", str(output), *flags]


def run(job: Path, output: Path, flags: Sequence[str], checkout: Path = report.REPOSITORY) -> dict[str, Any]:
    """Runs a job to its end with this checkout's package, and returns its summary. Raises ServerStartError."""
    done = subprocess.run(
        command_of(job, output, ["--overwrite", *flags]),
        env={**os.environ, **engines.QUIET, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ServerStartError(f"the batch job ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads((output.with_name(output.name + ".job") / "summary.json").read_text())
    return summary


def answers_of(output: Path) -> list[tuple[int, list[float]]]:
    """Returns the label log-probabilities of each answer with the number of its row, in the order of the file."""
    answers = map(orjson.loads, output.read_bytes().splitlines())
    return [
        (int(answer["custom_id"]), client.label_logprobs(answer["response"]["body"]["meta_info"])) for answer in answers
    ]
