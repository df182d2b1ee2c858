"""Evaluation sets of other projects, run unchanged in environments of their own against `/v1/systemone`."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from sgl_prefill.core.label_calibration import cross_validated, quality

JEVBENCH, SYS1BENCH = "jevbench==0.1.0", "sys1bench==0.3.2"
MINI_AT_ONCE = 4
CALIBRATED_BY = "temperature"


def _run(package: str, words: Sequence[str], **environment: str) -> str:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "tool", "run", "--python", sys.executable, "--from", package, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode != 0:
        raise report.InvalidRunError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def jevbench(url: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Relations between answers that hold for a coherent model, in percent that hold; no right answers are known."""
    suite = "examples" if quick else "jevbench-mini"
    output = folder / "jevbench.json"
    server = ["--url", f"{url}/v1/systemone", "--model", "jev-latest"]
    at_once = ["--concurrency", str(MINI_AT_ONCE), "--cache-dir", str(folder / "jevbench")]
    _run(JEVBENCH, ["jevbench", "eval", *server, "--suite", suite, *at_once, "--out", str(output)])
    found = json.loads(output.read_text())
    scores = found["scores"]
    groups = {name: 100 * of for name, of in scores["groups"].items() if of is not None}
    return {
        "suite": f"{JEVBENCH}, {suite}",
        "requests": found["result"]["requests"],
        "overall": 100 * scores["overall"],
        **groups,
    }


def sys1bench(url: str, folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Accuracy and calibration error of each question of its 200 items; the latter also after a temperature that is fitted to the
    other folds."""
    config = folder / "server.yaml"
    served = {
        "adapter": "jev_typesafe", "model_id": "jev-latest", "url": f"{url}/v1/systemone", "api_key": "none",
        "allow_alias": True, "deployment": "local", "timeout_s": 120,
    }  # fmt: skip
    config.write_text(json.dumps(served))  # JSON is YAML
    where = (
        "import sys1bench, pathlib; print(next(pathlib.Path(sys1bench.__file__).parent.glob('data/canary/*.jsonl')))"
    )
    items = _run(SYS1BENCH, ["python", "-c", where]).strip()
    output = folder / "predictions.jsonl"
    limit = ["--limit", "8"] if quick else []
    cache = str(folder / "cache.sqlite")
    words = ["sys1bench", "run", items, str(output), "--config", str(config), "--cache", cache]
    _run(SYS1BENCH, [*words, *limit], PYTHONWARNINGS="ignore")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    if failed := [row["error"] for row in rows if row["error"]]:
        raise report.InvalidRunError(f"{SYS1BENCH}: {len(failed)} of {len(rows)} answers are errors: {failed[0]}")
    key = "question_key"
    return [
        _figures(question, list(of_question))
        for question, of_question in itertools.groupby(
            sorted(rows, key=lambda row: str(row[key])), lambda row: row[key]
        )
    ]


def _figures(question: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    probabilities = [row["probs"] for row in rows]
    answers = [row["option_keys"].index(row["ground_truth"]) for row in rows]
    before = quality(probabilities, answers)
    logprobs = [[math.log(max(p, 1e-30)) for p in row] for row in probabilities]
    after = quality(cross_validated(CALIBRATED_BY, logprobs, answers), answers)
    return {
        "question": question,
        "options": len(probabilities[0]),
        "items": len(rows),
        "accuracy": before.accuracy,
        "largest_class": max(answers.count(one) for one in set(answers)) / len(answers),
        "calibration_error": before.expected_calibration_error,
        "calibration_error_after": after.expected_calibration_error,
    }
