"""What a process that was forked long ago learns of its parent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal

import pytest

from sgl_prefill import prefork


def test_a_process_gets_the_environment_of_the_moment_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EARLIER", "1")
    environment = prefork.ParentEnvironment()
    monkeypatch.setenv("SET_BY_SGLANG", "2")
    monkeypatch.delenv("EARLIER")
    sent = pickle.dumps(environment)
    monkeypatch.delenv("SET_BY_SGLANG")
    monkeypatch.setenv("EARLIER", "1")
    before = signal.getsignal(signal.SIGQUIT)
    try:
        pickle.loads(sent).adopt()
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert os.environ["SET_BY_SGLANG"] == "2"
    assert "EARLIER" not in os.environ


def test_without_the_forking_process_sglang_spawns_as_ever() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    prefork.after_set_envs_and_config(None)
    assert multiprocessing.get_start_method(allow_none=True) == before
