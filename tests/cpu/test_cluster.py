"""What a cluster refuses before it starts anything, and what it asks of the gateway."""

from __future__ import annotations

import argparse
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from sgl_prefill.cluster import __main__ as cluster
from sgl_prefill.entry import local_server
from sgl_prefill.entry.local_server import free_port
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import examine

README = (Path(cluster.__file__).parent / "README.md").read_text()


def free_neighbours() -> int:
    """Returns a free port before two more: the gateway's, and those of its first engines, which follow it."""
    while True:
        first = free_port()
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return first


def checked(*argv: str) -> tuple[argparse.Namespace, list[str]]:
    options, flags = cluster.parsed(["--router-port", str(free_neighbours()), *argv])
    cluster.check(options, flags)
    return options, flags


@pytest.fixture
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "free_memory_gb", lambda: (8.0, 16.0))
    monkeypatch.setattr(examine, "_port_problems", lambda *_: [])  # whoever listens on this machine
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--engines", "0"], "--engines is 0: it must be at least 1"),
        (["--engines", "-1"], "--engines is -1"),
        (["--engines", "1", "--port", "5"], "--port 5 is decided by the cluster: give --router-port"),
        (["--engines", "1", "--metrics-port", "0"], "--metrics-port is 0: it must be from 1 to 65535"),
        (["--engines", "2", "--engine-port", "65535"], "--engine-port is 65536"),
        (["--engines", "2", "--engine-port", "7000", "--metrics-port", "7001"], "7001 is asked for twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        checked(*argv)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--engine-port {port} on 127.0.0.1 cannot be used"):
            checked("--engines", "1", "--engine-port", str(port))


@pytest.mark.usefixtures("_much_memory")
def test_engines_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert (
        cluster.shares(2, ["--dtype", "float32"])
        == [(["--dtype", "float32", "--memory-budget-gb", "2.000"], {"OMP_NUM_THREADS": "3"})] * 2
    )
    assert (
        cluster.shares(2, ["--memory-budget-gb", "3"]) == [(["--memory-budget-gb", "3"], {"OMP_NUM_THREADS": "3"})] * 2
    )


@pytest.mark.usefixtures("_much_memory")
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--engines", "3", "--memory-budget-gb", "3"],
            "3 of --memory-budget-gb 3 need 9 GiB, and 8.0 GiB are free: start at most 2",
        ),
        (["--engines", "2", "--tp-size", "2"], "2 of 2 ranks each"),
        (["--engines", "40"], "would get 0.10 GiB each of 8.0 GiB"),
    ],
)
def test_more_engines_than_the_machine_holds_are_refused_with_the_numbers(argv: list[str], told: str) -> None:
    options, flags = cluster.parsed(argv)
    with pytest.raises(ConfigurationError, match=told):
        cluster.shares(options.engines, flags)


@pytest.mark.usefixtures("_much_memory")
@pytest.mark.parametrize(("budget_gb", "is_together"), [("1.5", True), ("1.6", False)])
def test_engines_start_together_where_all_fit_while_they_start(
    budget_gb: str, is_together: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 GiB are free, and each engine takes 2.5 beside its budget while it starts."""
    engines = cluster.shares(2, ["--memory-budget-gb", budget_gb])
    assert cluster.start_together(engines) == is_together
    said = "one after the other: together they could take 8.2 GiB while they start, and 8.0 GiB are free"
    assert (said in capsys.readouterr().err) != is_together


def test_each_engine_is_a_line_when_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the order in which they do; a start had been silent for two minutes."""
    answers = iter([False, False, False, True, True])
    monkeypatch.setattr(local_server, "is_healthy", lambda server, elapsed_s: next(answers))
    process = cast("subprocess.Popen[bytes]", None)
    server = local_server.LocalServer("http://127.0.0.1:1", [], process, tmp_path / "log")
    cluster._await([cluster.Child(f"engine {number} of 2", server) for number in (1, 2)])
    assert capsys.readouterr().err.splitlines() == [
        "sgl_prefill.cluster: engine 2 of 2 serves after 0 s",
        "sgl_prefill.cluster: engine 1 of 2 serves after 0 s",
    ]


def test_without_the_gateway_nothing_starts_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(cluster, "shares", lambda *_: pytest.fail("an engine was planned"))
    assert cluster.main(["--engines", "1", "--router-port", str(free_neighbours())]) == 2
    assert "pip install '.[router]'" in capsys.readouterr().err


def test_a_key_is_given_to_the_engines_and_to_the_gateway() -> None:
    assert cluster.parsed(["--engines", "1", "--api-key", "k"])[1] == ["--api-key", "k"]
    command = cluster.gateway_command(["http://a:1"], "user", "127.0.0.1", 1, 2, 30, "k")
    assert command[-2:] == ["--api-key", "k"]


def test_the_page_names_every_setting_of_the_gateway_and_why() -> None:
    for words, why in cluster.SETTINGS:
        shown = " ".join(words).replace(cluster.NEVER_S, "31536000")
        assert f"| `{shown}` | {why} |" in README, words
    command = cluster.gateway_command(["http://a:1"], "user", "127.0.0.1", 1, 2, 30, None)
    assert " ".join(command[command.index("--policy") :]).startswith(
        "--policy manual --assignment-mode min_group --routing-key-headers x-user-id"
    )
