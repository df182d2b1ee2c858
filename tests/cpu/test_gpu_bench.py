"""The GPU runbook with a `python` that only notes what it is asked for, and what its benchmarks make of what they see."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_steps, report
from benchmarks.gpu_hits import run as gpu_hits
from benchmarks.gpu_steps import CUT_OFF, GRACE_S, LEAST_S, Notes, Outcome, Step
from benchmarks.harness.client import Outcome as Answer
from benchmarks.mil import run as mil

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_bench.sh"
MODELS = ("llama-3.1-8b", "qwen-32b-fp8", "llama-3.3-70b-fp8")
PART_S = 540.0


def python_that(folder: Path, does: str) -> str:
    """A program in the place of `python`, which notes what it is asked for and then does this."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python3"
    python.write_text(f'#!/bin/sh\necho "$* $BENCH_MODEL" >>{folder}/asked\n{does}\n')
    python.chmod(0o755)
    (folder / "asked").touch()
    return str(python)


def test_what_decides_most_is_asked_first() -> None:
    """Kernels are compiled, then is it right, then the first model's speed, then other backends and models."""
    steps = gpu_steps.steps(MODELS, ["fa3", "triton"])
    names = [step.name for step in steps]
    assert names[:14] == [
        "look",
        "kernels",
        "warm_up-llama-3.1-8b-fa3",
        "memory",
        "servers-fa3",
        "shared_prefix-fa3",
        "storm",
        "smoke",
        "gpu_step_table-llama-3.1-8b-fa3",
        "gpu_wl1-llama-3.1-8b-fa3",
        "mil-llama-3.1-8b-fa3",
        "gpu_hits-llama-3.1-8b-fa3",
        "load-llama-3.1-8b-fa3",
        "hybrid-llama-3.1-8b-fa3",
    ]
    assert len(set(names)) == len(names)
    assert names.index("servers-triton") < names.index("mil-qwen-32b-fp8-fa3")
    assert names.index("warm_up-qwen-32b-fp8-fa3") < names.index("mil-qwen-32b-fp8-fa3")


def test_every_test_of_a_device_is_asked() -> None:
    """Each file is in a step; of `test_servers`, which is asked backend by backend, all tests know their backend."""
    steps = gpu_steps.steps(MODELS, ["fa3", "flashinfer", "triton"])
    folder = gpu_steps.HERE.parent / "tests" / "gpu"
    assert {file.name for file in folder.glob("test_*.py")} <= {Path(step.command[-1]).name for step in steps}
    fixtures = {"ours", "stock", "backend", "long_ones"}
    for function in ast.parse((folder / "test_servers.py").read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            assert fixtures & {argument.arg for argument in function.args.args}, function.name


def test_every_step_fits_a_part_and_names_what_exists() -> None:
    """Of 9 minutes, less what a cut-off benchmark needs to end its servers."""
    for step in gpu_steps.steps(MODELS, ["fa3", "flashinfer", "triton"]):
        assert LEAST_S <= step.limit_s <= PART_S - GRACE_S, step.name
        files = [word for word in step.command if word.endswith(".py")]
        assert files
        assert all((gpu_steps.HERE.parent / file).exists() for file in files), step.name


def test_a_step_that_has_ended_is_not_run_again_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    """The first call runs all three, the second none, and `--again` the one that is named."""
    python = python_that(tmp_path, 'case "$1" in b) exit 3;; esac')
    steps = [Step(name, (name,), LEAST_S) for name in "abc"]
    assert gpu_steps.run(steps, tmp_path, PART_S, python) == []
    assert (tmp_path / "asked").read_text().split() == ["a", "b", "c"]
    assert Notes(tmp_path).of(steps[1]).status == 3
    gpu_steps.run(steps, tmp_path, PART_S, python)
    assert (tmp_path / "asked").read_text().split() == ["a", "b", "c"]
    Notes(tmp_path).forget(["b"])
    gpu_steps.run(steps, tmp_path, PART_S, python)
    assert (tmp_path / "asked").read_text().split() == ["a", "b", "c", "b"]


def test_what_no_time_is_left_for_is_left_for_the_next_call(tmp_path: Path) -> None:
    """A part whose first step takes all of it: the others wait, in order, and a part of a minute begins nothing."""
    now = iter([0.0, 0.0, 0.0, PART_S - GRACE_S - LEAST_S + 1.0, PART_S - GRACE_S - LEAST_S + 1.0])
    python = python_that(tmp_path, "")
    steps = [Step(name, (name,), LEAST_S) for name in "abc"]
    left = gpu_steps.run(steps, tmp_path, PART_S, python, clock=lambda: next(now))
    assert [step.name for step in left] == ["b", "c"]
    assert [step.name for step in gpu_steps.run(steps, tmp_path, GRACE_S + LEAST_S - 1.0, python)] == ["b", "c"]
    assert (tmp_path / "asked").read_text().split() == ["a"]


def test_a_step_that_is_cut_off_goes_on_until_it_has_had_its_seconds_three_times(tmp_path: Path) -> None:
    """With less than its own limit it was the part that ended, and no try of its own."""
    (tmp_path / "asked").touch()
    python = python_that(tmp_path, "exec sleep 60")
    step = Step("long", ("long",), limit_s=0.2)
    for tries in (1, 2, 3):
        left = gpu_steps.run([step], tmp_path, PART_S, python)
        outcome = Notes(tmp_path).of(step)
        assert (outcome.status, outcome.tries, bool(left)) == (CUT_OFF, tries, tries < 3)
    assert "given up" in gpu_steps.shown(outcome)
    assert not Outcome(CUT_OFF, tries=0, seconds=300.0).is_over


def test_a_step_that_is_cut_off_leaves_no_process_behind(tmp_path: Path) -> None:
    """Neither one of a session of its own, as servers are, nor one that does not listen."""
    python = python_that(tmp_path, f"setsid sh -c 'trap : TERM; echo $$ >{tmp_path}/pid; exec sleep 60' & wait")
    gpu_steps.run([Step("server", ("server",), limit_s=2.0)], tmp_path, PART_S, python)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_script_runs_the_steps_and_says_what_is_left(tmp_path: Path) -> None:
    """It hands on folder, minutes and names, and makes a toolkit known."""
    does = (
        'case "$*" in *startup.examine*) echo export CUDA_HOME=/some/toolkit;;'
        ' *) echo "CUDA_HOME=$CUDA_HOME $BENCH_USERS $PYTHONPATH";; esac'
    )
    python = Path(python_that(tmp_path, does))
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "BENCH_MINUTES": "7"}
    for name in ("CUDA_HOME", "PYTHONPATH"):
        environment.pop(name, None)
    command = [str(SCRIPT), str(tmp_path / "out"), "--again", "memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"CUDA_HOME=/some/toolkit 3 {SCRIPT.parents[1]}\n"
    asked = (tmp_path / "asked").read_text().splitlines()[-1]
    assert asked.strip() == f"benchmarks/gpu_steps.py {tmp_path}/out --minutes 7 --again memory"


def test_tests_run_side_by_side_and_what_is_timed_alone(tmp_path: Path) -> None:
    """Each of two waits for the other, which has begun; the third has another name."""
    does = f"touch {tmp_path}/$1; case $1 in a) o=b;; b) o=a;; *) exit 3;; esac; until [ -e {tmp_path}/$o ]; do sleep 0.01; done"
    steps = [*(Step(name, (name,), LEAST_S, side_by_side="right") for name in "ab"), Step("c", ("c",), LEAST_S)]
    assert gpu_steps.run(steps, tmp_path, PART_S, python_that(tmp_path, does)) == []
    assert [Notes(tmp_path).of(step).status for step in steps] == [0, 0, 3]


def answer(n_cached: int) -> Answer:
    return Answer(0.0, 0.0, 0.0, 1.0, gpu_hits.PREFIX_TOKENS + 15, n_cached, [-1.0])


def test_graphs_are_counted_by_what_sglang_says_of_its_steps() -> None:
    """Of prefills alone, over all processes; what has not occurred has no line."""
    metrics = (
        "# HELP sglang:cuda_graph_passes_total Total number of forward passes categorized by CUDA graph.\n"
        'sglang:cuda_graph_passes_total{engine_type="unified",mode="prefill_cuda_graph",tp_rank="0"} 41.0\n'
        'sglang:cuda_graph_passes_total{engine_type="unified",mode="prefill_none",tp_rank="0"} 1e+01\n'
        'sglang:cuda_graph_passes_total{engine_type="unified",mode="decode_none",tp_rank="0"} 7.0\n'
    )
    assert gpu_hits.passes_in(metrics) == (41, 10)
    assert gpu_hits.passes_in("").n_all == 0


def test_a_request_that_found_no_prefix_makes_a_run_of_hits_invalid() -> None:
    """One of two."""
    gpu_hits.check_hits([answer(gpu_hits.PREFIX_TOKENS)] * 2, "ours")
    with pytest.raises(report.InvalidRunError, match="1 of 2 requests were no hits"):
        gpu_hits.check_hits([answer(gpu_hits.PREFIX_TOKENS), answer(0)], "ours")


def test_a_setting_that_failed_costs_its_own_ratios_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a gain of graphs that were not replayed is a missed target on a device, as is one of prefixes that nobody shared."""
    monkeypatch.setattr("benchmarks.shapes.HAS_CUDA", True)

    def measured(engine: Any, per_s: float, replayed: float) -> dict[str, Any]:
        rows = [
            {
                "engine": engine.name,
                "suffix_tokens": n,
                "requests_per_s": per_s,
                "steps": 300,
                "replayed_share": replayed,
                "saved_tokens": 0,
            }
            for n in gpu_hits.SUFFIXES_TOKENS
        ]
        return {"rows": [], "means": rows}

    found = {
        gpu_hits.SINGLE.name: measured(gpu_hits.SINGLE, 90.0, 0.0),
        gpu_hits.SINGLE_EAGER.name: measured(gpu_hits.SINGLE_EAGER, 50.0, 0.0),
        gpu_hits.TOGETHER.name: measured(gpu_hits.TOGETHER, 90.0, 0.0),
        gpu_hits.APART.name: {"failed": "why", "rows": [], "means": []},
    }
    targets = {target.name: target for target in gpu_hits.targets_of(found)}
    assert targets["hits of 15 tokens a second, ours, one a step / ours, one a step, no graphs"].value == 1.8
    for missed in ("replayed", "not read again"):
        of_both_lengths = [target for name, target in targets.items() if missed in name]
        assert len(of_both_lengths) == 2
        assert not any(target.met for target in of_both_lengths)
    assert len(targets) == 6


def test_engines_that_answer_one_hit_differently_are_not_compared() -> None:
    """NaN is no answer either."""
    row = {"suffix_tokens": 15, "number": 0}
    agreed = {"a": {"rows": [{**row, "logprobs": [[-1.0]]}]}, "b": {"rows": [{**row, "logprobs": [[-1.002]]}]}}
    gpu_hits.check_agreement(agreed)
    agreed["b"]["rows"][0]["logprobs"] = [[float("nan")]]
    with pytest.raises(report.InvalidRunError, match="b disagrees"):
        gpu_hits.check_agreement(agreed)


def test_a_card_of_80_gib_need_not_have_all_of_them_free() -> None:
    """An H100 shows 79.6 GiB: nothing is taken, and 40 of them are left where 40 are asked for; a card of 48 is refused."""
    free_bytes = int(79.1 * 2**30)
    assert mil.bytes_to_hold(free_bytes, 80) == 0
    assert mil.bytes_to_hold(free_bytes, 40) == free_bytes - (40 << 30)
    with pytest.raises(report.InvalidRunError, match=r"47\.5 GiB of the device are free, and 80 are wanted"):
        mil.bytes_to_hold(int(47.5 * 2**30), 80)


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
        mil.check([-1.0, float("nan")])


def test_two_lengths_that_noise_has_swapped_end_no_search() -> None:
    """A shorter prompt took more memory than a longer one: the search goes on in proportion to the last."""
    tries = [{"tokens": 2180, "peak_mib": 250.0}, {"tokens": 2000, "peak_mib": 320.0}]
    assert mil.next_length(tries) == 1600
