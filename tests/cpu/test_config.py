"""Options, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_prefill.config import PrefillConfig, flag_of
from sgl_prefill.cpu import lm_head
from sgl_prefill.entry.local_server import free_port
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import arguments, examine

FREE_PORT = str(free_port())


def parsed(*words: str) -> PrefillConfig:
    parser = argparse.ArgumentParser()
    PrefillConfig.add_cli_arguments(parser)
    return PrefillConfig.from_namespace(parser.parse_args(words))


def given(name: str, value: Any) -> list[str]:
    """An option on a command line."""
    flag = flag_of(name)
    return ["--set", f"{name}={value}"] if flag.startswith("--set") else [flag, str(value)]


def test_there_are_few_flags() -> None:
    """A user reads them all; what is measured at start or proven is a setting for experiments."""
    flags = {flag_of(field.name).split()[0] for field in dataclasses.fields(PrefillConfig)}
    assert len(flags) <= 20


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("sharer=count", "there is no setting 'sharer'; the settings are background_step_ms, "),
        ("scheduling=fifo", "there is no setting 'scheduling'"),
        ("sharers", "--set sharers is '': it must be count or ignore"),
        ("background_step_ms=soon", "'soon' is no value of background_step_ms"),
        ("skip_parity_gate=yes", "'yes' is no value of skip_parity_gate"),
    ],
)
def test_a_setting_that_is_none_is_named(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        parsed("--set", assignment)
    assert parsed("--set", "skip_parity_gate=true", "--set", "max_queue_s=3").max_queue_s == 3.0


def test_the_command_line_defaults_are_the_dataclass_defaults() -> None:
    """One source of defaults."""
    words = [
        word
        for field in dataclasses.fields(PrefillConfig)
        if (value := getattr(PrefillConfig(), field.name)) is not None and not isinstance(value, bool)
        for word in given(field.name, value)
    ]
    assert parsed() == parsed(*words, *given("pack_step_tokens", "auto")) == PrefillConfig()
    assert parsed("--fairness-lambda", "0", "--allow-generation").allow_generation


def test_a_start_without_any_flag_has_nothing_wrong() -> None:
    assert arguments.check_argv(PrefillConfig(), [], listens=False) == []
    assert arguments.value_of([], "--port") is None
    assert arguments.value_of(["--port", "1", "--port=2", "--enable-x"], "--port") == "2"
    assert arguments.value_of(["--enable-x"], "--enable-x") == ""


def test_the_config_survives_the_way_to_the_scheduler_process() -> None:
    """It is an argument of a spawned process."""
    config = PrefillConfig(scheduling="stock", max_body_mb=1.0)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scheduling = "calibrated-srjf"  # type: ignore[misc]


def test_all_bad_values_stand_in_one_message() -> None:
    """Nobody should have to start four times."""
    with pytest.raises(ConfigurationError) as caught:
        PrefillConfig(scheduling="lifo", fairness_lambda=float("nan"), memory_budget_gb=-1, max_body_mb=0)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "--scheduling",
        "--fairness-lambda",
        "--memory-budget-gb",
        "--max-body-mb",
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("fairness_lambda", value) for value in (float("nan"), float("inf"), -1.0)),
        *(("max_queue_s", value) for value in (float("nan"), -0.5)),
        ("pack_step_tokens", -1),
    ],
)
def test_a_policy_with_a_number_that_orders_nothing_is_refused(option: str, value: float) -> None:
    """A NaN would compare false with everything: the order would be arbitrary, silently."""
    with pytest.raises(ConfigurationError, match=f"{flag_of(option)} is {value}"):
        PrefillConfig(**{option: value})  # type: ignore[arg-type]


def test_steps_are_packed_unless_one_request_a_step_is_asked_for() -> None:
    """None is `auto`. Only one request a step needs the flag of SGLang that holds a step to one."""
    assert parsed().pack_step_tokens is None
    argv = ["--prefill-max-requests", "8", "--port", FREE_PORT]
    assert arguments.check_argv(PrefillConfig(), argv) == []
    assert "--prefill-max-requests" not in arguments.required_flags(PrefillConfig())
    (problem,) = arguments.check_argv(PrefillConfig(pack_step_tokens=0), argv)
    assert "--set pack_step_tokens=auto" in problem
    one_a_step = arguments.required_flags(PrefillConfig(pack_step_tokens=0))
    assert arguments.value_of(one_a_step, "--prefill-max-requests") == "1"


def test_stock_scheduling_is_not_packed_by_us_and_refuses_to_be_told_so() -> None:
    """SGLang's own scheduler fills its steps by itself: the default does not concern it, a value that was given does."""
    assert PrefillConfig(scheduling="stock").pack_step_tokens == 0
    assert parsed("--scheduling", "stock", *given("pack_step_tokens", 0)) == PrefillConfig(scheduling="stock")
    for value in (None, 300):
        with pytest.raises(ConfigurationError, match="--set pack_step_tokens is not for --scheduling stock"):
            PrefillConfig(scheduling="stock", pack_step_tokens=value)


@pytest.mark.parametrize(
    ("accelerator", "expected"), [(False, lm_head.MAX_ROWS), (True, arguments.DEVICE_MAX_REQUESTS)]
)
def test_the_requests_of_a_packed_step_are_bounded(
    monkeypatch: pytest.MonkeyPatch, accelerator: bool, expected: int
) -> None:
    """On a host by the rows that get float32 logits, on a device by the memory that their logits take."""
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: accelerator)
    assert arguments.default_settings(PrefillConfig())["prefill_max_requests"] == expected
    for other in (PrefillConfig(pack_step_tokens=0), PrefillConfig(scheduling="stock")):
        assert "prefill_max_requests" not in arguments.default_settings(other)


PAPER = {
    "paper": True,
    "scheduling": "calibrated-srjf",
    "fairness_lambda": 500.0,
    "jct_model": "cache-miss",
    "sharers": "ignore",
    "max_queue_s": None,
    "pack_step_tokens": 0,
    "fair_by": "none",
}


def test_the_papers_engine_is_one_flag() -> None:
    """The configuration that the record shows holds what the flag means; the other options are as without it."""
    config = dataclasses.asdict(parsed("--paper"))
    assert config == {**dataclasses.asdict(PrefillConfig()), **PAPER}
    assert parsed("--paper") == PrefillConfig(paper=True)


def test_the_papers_values_may_be_repeated_and_travel() -> None:
    """Written out, copied with another option changed, and pickled."""
    repeated = parsed(
        "--paper", "--fairness-lambda", "500", *given("pack_step_tokens", 0), *given("jct_model", "cache-miss")
    )
    assert repeated == PrefillConfig(**PAPER)  # type: ignore[arg-type]
    assert dataclasses.replace(repeated, max_body_mb=1.0).jct_model == "cache-miss"
    assert pickle.loads(pickle.dumps(repeated)) == repeated


def test_each_contradiction_of_the_papers_engine_is_named() -> None:
    """Also a value that is our default: it was asked for."""
    words = ["--paper", "--fairness-lambda", "100", "--scheduling", "stock"]
    for name, value in (
        ("pack_step_tokens", "auto"),
        ("max_queue_s", 5),
        ("jct_model", "fitted"),
        ("sharers", "count"),
    ):
        words += given(name, value)
    with pytest.raises(ConfigurationError) as caught:
        parsed(*words)
    assert sorted(str(caught.value).splitlines()) == [
        "--fairness-lambda is 100, and --paper means 500: leave one of the two out",
        "--scheduling is stock, and --paper means calibrated-srjf: leave one of the two out",
        "--set jct_model is fitted, and --paper means cache-miss: leave one of the two out",
        "--set max_queue_s is 5, and --paper means no bound: leave one of the two out",
        "--set pack_step_tokens is auto, and --paper means 0: leave one of the two out",
        "--set sharers is count, and --paper means ignore: leave one of the two out",
    ]


def test_a_flag_of_sglangs_against_the_papers_engine_is_refused_with_a_remedy_that_works() -> None:
    """`pack_step_tokens=auto` alone would be refused beside --paper."""
    (problem,) = arguments.check_argv(PrefillConfig(paper=True), ["--prefill-max-requests", "8", "--port", FREE_PORT])
    assert problem.endswith("or start with --set pack_step_tokens=auto and without --paper")


def test_the_offline_engine_takes_and_refuses_the_same() -> None:
    """Before anything is started; its keyword arguments are the fields."""
    from sgl_prefill.entry.engine import Engine, sglang_defaults

    assert sglang_defaults(PrefillConfig(paper=True))["prefill_max_requests"] == 1
    with pytest.raises(ConfigurationError, match="--set pack_step_tokens is auto, and --paper means 0"):
        Engine(model_path="/no/such/model", paper=True, pack_step_tokens=None)


def test_the_help_shows_every_default_and_what_the_paper_means() -> None:
    """None is written as a user would."""
    parser = argparse.ArgumentParser()
    PrefillConfig.add_cli_arguments(parser)
    text = " ".join(parser.format_help().split()).replace("- ", "-")  # lines may break behind a hyphen
    for words in ("(default: auto)", "max_queue_s (no bound)", "(default: 500)", "(default: half of the free memory)"):
        assert words in text
    for words in ("pack_step_tokens=0", "--fairness-lambda 500", "sharers=ignore", "jct_model=cache-miss"):
        assert words in text
    assert "NOT_GIVEN" not in text


def test_flags_that_agree_are_no_contradiction() -> None:
    """Writing out what the engine sets anyway is fine."""
    argv = [
        "--chunked-prefill-size",
        "-1",
        "--disable-overlap-schedule",
        "--prefill-max-requests",
        "1",
        "--port",
        FREE_PORT,
    ]
    assert arguments.check_argv(PrefillConfig(pack_step_tokens=0), argv) == []


@pytest.mark.parametrize(
    ("n_ranks", "heads", "kv_heads", "told"),
    [
        (2, 9, 3, "this model has 9 attention heads and 3 of K and V"),
        (4, 8, 3, "this model has 8 attention heads and 3 of K and V"),
        (1 << 20, 1 << 20, 1 << 20, "each rank needs one of its own"),
        (2, 8, 4, None),
        (2, 8, 1, None),  # each rank has a copy of the one
        (1, 9, 3, None),
    ],
)
def test_ranks_need_equal_shares_of_heads_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_ranks: int, heads: int, kv_heads: int, told: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    model = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(model))
    problems = arguments.rank_problems(n_ranks, str(tmp_path))
    assert [told is not None and told in problem for problem in problems] == ([] if told is None else [True])


def test_a_taken_port_is_named() -> None:
    """Before minutes of loading."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = arguments.check_argv(PrefillConfig(), ["--port", str(port)])
    assert problem.startswith(f"--port {port} on 127.0.0.1 cannot be used (Address already in use)")


def test_a_model_path_that_holds_no_model_is_named(tmp_path: Path) -> None:
    """A missing folder, and a folder without a model; a hub name is left to SGLang."""
    assert (
        "does not exist" in arguments.check_argv(PrefillConfig(), ["--model-path", "/no/such", "--port", FREE_PORT])[0]
    )
    assert (
        "without config.json"
        in arguments.check_argv(PrefillConfig(), [f"--model-path={tmp_path}", "--port", FREE_PORT])[0]
    )
    assert arguments.check_argv(PrefillConfig(), ["--model", "org/name", "--port", FREE_PORT]) == []


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--a", "1"], "1"),
        (["--a=2"], "2"),
        (["--a"], ""),
        (["--a", "--b"], ""),
        (["--b", "3"], None),
        (["--a", "1", "--a", "4"], "4"),
    ],
)
def test_value_of_reads_a_command_line_as_argparse_would(argv: list[str], value: str | None) -> None:
    """Separate, joined, switch, absent, and the last of several."""
    assert arguments.value_of(argv, "--a") == value


def test_the_memory_budget_becomes_a_fraction_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the free memory by default; more than there is, or a budget beside an accelerator, is refused."""
    free = type("Memory", (), {"available": 10 << 30})
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: False)
    monkeypatch.setattr(examine, "container_free_bytes", lambda: math.inf)
    assert arguments.memory_fraction(PrefillConfig()) == 0.5
    assert arguments.memory_fraction(PrefillConfig(memory_budget_gb=4)) == 0.4
    with pytest.raises(ConfigurationError, match=r"10\.0 GiB free"):
        arguments.memory_fraction(PrefillConfig(memory_budget_gb=11))
    monkeypatch.setattr(examine, "container_free_bytes", lambda: 4 << 30)
    assert arguments.memory_fraction(PrefillConfig()) == 0.2
    with pytest.raises(ConfigurationError, match=r"container .* has 4\.0 GiB free"):
        arguments.memory_fraction(PrefillConfig(memory_budget_gb=5))
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    assert arguments.memory_fraction(PrefillConfig()) is None
    with pytest.raises(ConfigurationError, match="--mem-fraction-static"):
        arguments.memory_fraction(PrefillConfig(memory_budget_gb=4))


@pytest.mark.parametrize(
    ("capability", "accelerator", "dtype"),
    [("AVX2", False, "float32"), ("AVX512", False, None), ("AVX2", True, None), ("DEFAULT", False, None)],
)
def test_a_processor_that_is_slow_in_bfloat16_serves_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: str, accelerator: bool, dtype: str | None
) -> None:
    """oneDNN has no bfloat16 below AVX-512; "DEFAULT" is what other kinds of processor say. A device decides for itself."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("sgl_prefill.cpu.detect.has_accelerator", lambda: accelerator)
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: accelerator)
    assert arguments.default_settings(PrefillConfig()).get("dtype") == dtype
    assert ("--dtype" in arguments.default_flags(PrefillConfig())) == (dtype is not None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model-path", "/no/such/model"], "--model-path /no/such/model does not exist"),
        (["--enable-mixed-chunk", "--scheduling", "fifo"], "--enable-mixed-chunk is True and must be False"),
        (["--fairness-lambda", "-1"], "--fairness-lambda is -1.0"),
    ],
)
def test_a_refused_start_exits_with_2_and_one_message(flags: list[str], expected: str) -> None:
    """On stderr, without a traceback."""
    command = [sys.executable, "-m", "sgl_prefill.launch_server", "--port", FREE_PORT, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["launch_server", "mil", "plan"])
def test_help_comes_at_once(module: str) -> None:
    """It needs neither torch nor SGLang, which are blocked here, so that no import warning and no 20 seconds come before it."""
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['sglang'] = None; sys.argv = ['x', '--help'];"
        f" runpy.run_module('sgl_prefill.{module}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""
