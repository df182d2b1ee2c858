"""How a server ends, with a toy in the place of SGLang's manager."""

from __future__ import annotations

import asyncio
import signal
from http import HTTPStatus
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_prefill.http import shutdown as ending
from sgl_prefill.http.shutdown import DIED, FAILED, INTERRUPTED, SHUTTING_DOWN, Ending
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager


class Manager:
    """Holds requests until they are answered or refused."""

    def __init__(self, *waiting: str) -> None:
        self.rid_to_state = dict.fromkeys(waiting)
        self.refused: dict[str, str] = {}
        self.gracefully_exit = False
        self.scheduler_was_asked = False
        self._subprocess_watchdog = None

    def refuse(self, rid: str, status: HTTPStatus, message: str) -> None:
        assert status == HTTPStatus.SERVICE_UNAVAILABLE
        self.refused[rid] = message
        del self.rid_to_state[rid]

    def ask_scheduler_to_end(self) -> None:
        self.scheduler_was_asked = True


class Loop:
    """Takes down who handles which signal."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}

    def add_signal_handler(self, number: int, handler: Any, *arguments: Any) -> None:
        self.handlers[number] = lambda: handler(*arguments)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_is_a_scheduler_left", lambda: False)


def end(
    manager: Manager, number: int, drain_s: float, answer: str | None = None, times: int = 1
) -> tuple[Ending, list[str]]:
    """Sends a signal so many times; `answer`: the request that is answered thereafter."""
    server, events, loop = Ending(drain_s), [], Loop()
    server._stop_listening = lambda: events.append("ended")
    server.watch(manager, loop)  # type: ignore[arg-type]

    async def run() -> None:
        ends = asyncio.ensure_future(server.run(manager))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not ends.done(), "it runs until it is asked to end"
        for _ in range(times):
            loop.handlers[number]()
        if answer is not None:
            await asyncio.sleep(0)
            del manager.rid_to_state[answer]
            events.append(answer)
        await ends

    asyncio.run(run())
    return server, events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_waits_is_answered_first(number: int) -> None:
    manager = Manager("a")
    server, events = end(manager, number, drain_s=60, answer="a")
    assert (server.reason, server.status, events) == (SHUTTING_DOWN, 0, ["a", "ended"])
    assert manager.gracefully_exit
    assert manager.scheduler_was_asked
    assert not manager.refused


def test_what_is_not_done_in_time_is_refused_by_name() -> None:
    manager = Manager("a", "b")
    server, events = end(manager, signal.SIGTERM, drain_s=0)
    assert (server.status, events) == (0, ["ended"])
    assert set(manager.refused) == {"a", "b"}
    assert "within 0 s" in manager.refused["a"]


def test_a_second_interrupt_waits_for_nobody() -> None:
    manager = Manager("a")
    server, events = end(manager, signal.SIGINT, drain_s=3600, times=2)
    assert (server.reason, server.status, events) == (INTERRUPTED, 130, ["ended"])
    assert INTERRUPTED in manager.refused["a"]


def test_where_a_process_has_died_everyone_hears_of_it_at_once() -> None:
    manager = Manager("a", "b")
    server, events = end(manager, signal.SIGQUIT, drain_s=3600)
    assert (server.reason, server.status, events) == (DIED, 1, ["ended"])
    assert DIED in manager.refused["b"]
    assert not manager.scheduler_was_asked


def test_where_answers_are_no_longer_handed_out_everyone_hears_of_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(manager: Any) -> None:
        raise ValueError("a metric")

    monkeypatch.setattr(TokenizerManager, "handle_loop", fail)
    server, events, waiting = Ending(drain_s=3600), [], Manager("a")
    server._stop_listening = lambda: events.append("ended")
    manager = PrefillTokenizerManager.__new__(PrefillTokenizerManager)
    manager.__dict__.update(vars(waiting), _ending=server, refuse=waiting.refuse)

    async def run() -> None:
        await manager.handle_loop()
        await manager.sigterm_watchdog()

    asyncio.run(run())
    assert (server.reason, server.status, events) == (FAILED, 1, ["ended"])
    assert FAILED in waiting.refused["a"]
