"""The GPU runbook with a `python` that only notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.mil import run as mil

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_bench.sh"


def asked(folder: Path, minutes: int) -> tuple[list[str], str]:
    """(the benchmarks with their models, in order; what the script says)"""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo triton; exit; fi\necho "$1 $2 $3 $BENCH_MODEL" >>{folder}/asked\n'
        'case "$1" in *mil*) exit 3;; esac\n'
    )
    python.chmod(0o755)
    (folder / "asked").write_text("")
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "BENCH_MINUTES": str(minutes)}
    command = [str(SCRIPT), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return (folder / "asked").read_text().splitlines(), done.stdout


def test_the_first_questions_are_asked_of_all_models_first_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    """Correctness once, then each question for three models; then a report of each."""
    lines, said = asked(tmp_path, 20)
    assert lines[0].startswith("-m pytest -q")
    benchmarks = [line.split()[0] for line in lines if "run.py" in line]
    questions = ("mil", "hybrid_overhead", "post_recommendation", "credit_verification")
    assert benchmarks == [f"benchmarks/{question}/run.py" for question in questions for _ in range(3)]
    assert [line.split()[-1] for line in lines if "mil/run.py" in line] == [
        "llama-3.1-8b",
        "qwen-32b-fp8",
        "llama-3.3-70b-fp8",
    ]
    assert said.count("ended with 3") == 3
    assert sum("make_report.py" in line for line in lines) == 3


def test_what_no_time_is_left_for_says_so(tmp_path: Path) -> None:
    """Of 13 steps."""
    lines, said = asked(tmp_path, 0)
    assert not any("run.py" in line for line in lines)
    assert said.count("not run: no time left") == 13


def test_an_input_that_does_not_fit_a_device_is_tried_shorter() -> None:
    """A pool of 2,000 tokens where 1,200 fit: 2,000, 1,500 and 1,125. Where nothing fits, the last failure is raised."""

    def serve(n_tokens: int) -> dict[str, int]:
        if n_tokens > 1200:
            raise report.InvalidRunError("out of memory")
        return {"tokens": n_tokens}

    assert mil.first_that_fits(serve, 2000) == {"tokens": 1125}
    with pytest.raises(report.InvalidRunError):
        mil.first_that_fits(serve, 20_000)


def test_a_model_that_stock_cannot_serve_at_all_has_no_ratio() -> None:
    """And ours a row by itself."""
    output = ["activations of 100 tokens      1.0 MiB      4112 bytes a token", "longest input in tokens: 100"]
    ours = {
        "model": "llama-3.1-8b-quarter",
        "engine": mil.PRODUCT,
        "longest_input_tokens": 900,
        "how": {"mil_output": output},
    }
    stock: dict[str, Any] = {
        "model": "llama-3.1-8b-quarter",
        "engine": "stock, unchunked",
        "longest_input_tokens": None,
        "how": {},
    }
    names = [target.name for target in mil.targets_of([ours, stock])]
    assert len(names) == 1
    assert "bytes per token" in names[0]
    (ratio, _) = mil.targets_of([ours, {**stock, "longest_input_tokens": 100}])
    assert ratio.value == 9.0


def test_the_longest_input_counts_where_it_was_answered_and_right() -> None:
    output = ["activations of 100 tokens      1.0 MiB      4112 bytes a token", "longest input in tokens: 100"]
    row = {"model": "llama-3.1-8b-quarter", "engine": mil.PRODUCT, "longest_input_tokens": 900}
    row |= {"how": {"mil_output": output}, "served": {"answered": True, "difference": 2 * mil.MAX_LOGPROB_DIFFERENCE}}
    targets = {target.name: target.met for target in mil.targets_of([row])}
    assert targets["llama-3.1-8b-quarter: the longest input is answered to its end (1: yes)"]
    assert not targets["llama-3.1-8b-quarter: its log-probabilities, largest difference from stock in one pass"]
    with pytest.raises(report.InvalidRunError, match="the answer is"):
        mil.logprobs_of({"output_token_ids_logprobs": [[[float("nan"), 100, None]]]})


def test_two_lengths_that_noise_has_swapped_end_no_search() -> None:
    """A shorter prompt took more memory than a longer one: the search goes on in proportion to the last."""
    tries = [{"tokens": 2180, "peak_mib": 250.0}, {"tokens": 2000, "peak_mib": 320.0}]
    assert mil.next_length(tries) == 1600
