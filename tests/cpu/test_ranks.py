"""Ranks on a host: whose cores are whose, and who says why a start has failed."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_context, get_parallel

from sgl_prefill.cpu import rank_threads
from sgl_prefill.entry import processes
from sgl_prefill.entry.prefork import Launcher
from sgl_prefill.entry.processes import ProcessState
from sgl_prefill.errors import ParityError


@pytest.mark.parametrize(("text", "cores"), [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("5,7", [5, 7])])
def test_cores_are_read_as_sglang_writes_them(text: str, cores: list[int]) -> None:
    assert rank_threads.cores_of(text) == cores


def test_each_rank_gets_as_many_cores_unless_the_user_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    monkeypatch.setattr(os, "environ", {})  # not delenv: it restores nothing where the variable was not set before
    rank_threads.share_cores(1)
    assert rank_threads.BIND_VARIABLE not in os.environ
    rank_threads.share_cores(2)
    assert os.environ[rank_threads.BIND_VARIABLE] == "2,3|5,8"
    os.environ[rank_threads.BIND_VARIABLE] = "0|1"
    rank_threads.share_cores(2)
    assert os.environ[rank_threads.BIND_VARIABLE] == "0|1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_start_lets_rank_0_speak_first_and_then_ends_all(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most often all ranks fail alike, and one message is enough; where one fails alone, the others would wait for it."""
    done: list[Any] = []
    monkeypatch.setattr(time, "sleep", lambda s: done.append((s, capsys.readouterr().err)))
    monkeypatch.setattr(Launcher, "report_failure", lambda _: done.append("reported"))
    monkeypatch.setattr(os, "_exit", lambda status: done.append(status))

    def fails(*_: Any) -> None:
        raise ParityError("the paths disagree")

    state = ProcessState(Launcher(1, 1))
    scheduler: Any = object()
    arguments: Any = SimpleNamespace(device="cpu", model_path="m")
    with get_context().override_server_args(tp_size=2), get_parallel().override(tp_rank=rank):
        processes.around_scheduler_init(state, fails, scheduler, arguments, None)
    said = "sgl_prefill: cannot start\nthe paths disagree\n"
    waited = [] if rank == 0 else [(processes.OTHER_RANKS_WAIT_S, "")]
    assert done == [*waited, "reported", (processes.END_TIMEOUT_S, said), 1]
