"""A request of many prompts stops neither the event loop nor the scheduler for long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_prefill.entry.in_process import SteppedTokenizerManager
from sgl_prefill.http import tokenizer_manager
from sgl_prefill.http.tokenizer_manager import SEND_AT_ONCE, PrefillTokenizerManager

N_PROMPTS = 100


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What SGLang's manager was asked to do, in order."""
    found: list[Any] = []

    async def note(self: Any, what: Any) -> None:
        found.append(what)

    for name in ("_tokenize_one_request", "_send_one_request", "_send_batch_request"):
        monkeypatch.setattr(TokenizerManager, name, note)
    return found


def run_beside_another(manager: Any, done: list[Any]) -> int:
    """Returns how often another task had its turn until all prompts were done."""

    async def story() -> int:
        n_turns = 0

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for number in range(N_PROMPTS):
            await manager._tokenize_one_request(number)
            await manager._send_one_request(number)
        task.cancel()
        return n_turns

    return asyncio.run(story())


def test_others_have_their_turn_between_the_prompts_of_a_request(
    done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_manager, "AT_ONCE_S", -1.0)  # each prompt takes too long
    assert run_beside_another(object.__new__(PrefillTokenizerManager), done) >= N_PROMPTS
    assert done == [number for number in range(N_PROMPTS) for _ in range(2)]


def test_an_engine_in_this_process_runs_a_request_at_once(done: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner counts on it."""
    monkeypatch.setattr(tokenizer_manager, "AT_ONCE_S", -1.0)
    monkeypatch.setattr(SteppedTokenizerManager, "_runs", lambda *_: True)
    assert run_beside_another(object.__new__(SteppedTokenizerManager), done) == 0


def test_many_prompts_reach_the_scheduler_in_small_messages(done: list[Any]) -> None:
    prompts = list(range(N_PROMPTS))
    asyncio.run(object.__new__(PrefillTokenizerManager)._send_batch_request(prompts))
    assert max(map(len, done)) == SEND_AT_ONCE
    assert [one for message in done for one in message] == prompts
