"""What a process that was forked long ago learns of its parent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill.entry import prefork


def test_a_process_gets_the_environment_of_the_moment_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EARLIER", "1")
    environment = prefork.ParentEnvironment(signal.SIGQUIT)
    monkeypatch.setenv("SET_BY_SGLANG", "2")
    monkeypatch.delenv("EARLIER")
    sent = pickle.dumps(environment)
    monkeypatch.delenv("SET_BY_SGLANG")
    monkeypatch.setenv("EARLIER", "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGINT)}
    try:
        launcher = pickle.loads(sent).adopt()
        assert (
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        )  # a terminal sends it to the launcher, too, which drains
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert launcher == (os.getpid(), signal.SIGQUIT)
    assert os.environ["SET_BY_SGLANG"] == "2"
    assert "EARLIER" not in os.environ


@pytest.mark.parametrize(
    ("begun", "dp_size", "n_detokenizers", "expected"),
    [
        ("here", 1, 1, "forkserver"),
        ("nowhere", 1, 1, "spawn"),
        ("in the process that has forked this one", 1, 1, "spawn"),
        ("here", 2, 1, "spawn"),
        ("here", 1, 2, "spawn"),
    ],
)
def test_only_processes_that_adopt_the_environment_are_forked(
    monkeypatch: pytest.MonkeyPatch, begun: str, dp_size: int, n_detokenizers: int, expected: str
) -> None:
    monkeypatch.setattr(prefork, "_begun_in", {"here": os.getpid(), "nowhere": None}.get(begun, os.getppid()))
    before = multiprocessing.get_start_method(allow_none=True)
    server_args: Any = SimpleNamespace(dp_size=dp_size, detokenizer_worker_num=n_detokenizers)
    try:
        multiprocessing.set_start_method("spawn", force=True)
        prefork.fork_from_here(server_args)
        assert multiprocessing.get_start_method() == expected
    finally:
        multiprocessing.set_start_method(before, force=True)
