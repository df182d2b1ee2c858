"""A request of many prompts stops neither the event loop nor the scheduler for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_prefill.config import PrefillConfig
from sgl_prefill.http import tokenizer_manager
from sgl_prefill.http.tokenizer_manager import AT_ONCE, PrefillTokenizerManager
from sgl_prefill.port.steps import clients

N_PROMPTS = 100


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What SGLang's manager was asked to do, in order."""
    found: list[Any] = []

    async def note(self: Any, what: Any) -> None:
        found.append(what)

    for name in ("_tokenize_one_request", "_send_one_request"):
        monkeypatch.setattr(TokenizerManager, name, note)
    return found


def manager_with(**options: Any) -> PrefillTokenizerManager:
    manager = object.__new__(PrefillTokenizerManager)
    manager.prefill_config = PrefillConfig(**options)
    return manager


def turns_of_another(work: Callable[[], Coroutine[Any, Any, None]], caller: Any) -> int:
    """Returns how often another task had its turn until all prompts were done."""

    async def story() -> int:
        n_turns = 0

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        with clients.calling(caller):
            await work()
        task.cancel()
        return n_turns

    return asyncio.run(story())


def test_others_have_their_turn_between_the_prompts_of_a_request(
    done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_manager, "PAUSE_S", 0)
    manager = manager_with()

    async def work() -> None:
        for number in range(N_PROMPTS):
            await manager._tokenize_one_request(number)
            await manager._send_one_request(number)

    assert turns_of_another(work, clients.Caller()) >= 2 * N_PROMPTS // AT_ONCE
    assert done == [number for number in range(N_PROMPTS) for _ in range(2)]
    assert turns_of_another(work, None) == 0, "the owner of an engine in this process counts on it"


def test_one_prompt_waits_for_no_pause(done: list[Any]) -> None:
    manager = manager_with()
    assert turns_of_another(lambda: manager._send_one_request(1), clients.Caller()) == 0


def test_only_a_short_list_of_prompts_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenizerManager, "_should_use_batch_tokenization", lambda *_: True)
    manager = manager_with()
    with clients.calling(clients.Caller()):
        assert manager._should_use_batch_tokenization(AT_ONCE, None)
        assert not manager._should_use_batch_tokenization(AT_ONCE + 1, None)
        limited = manager_with(max_client_waiting="200")
        assert limited._should_use_batch_tokenization(AT_ONCE + 1, None), "it is refused whole, or not at all"
    assert manager._should_use_batch_tokenization(AT_ONCE + 1, None), "an engine in this process reads no messages"


def test_stop_texts_are_tokenised_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(text: str, **_: Any) -> list[int]:
        encoded.append(text)
        return [0] * len(text)

    def created(self: Any, obj: Any, *_: Any) -> Any:
        params = SamplingParams(**obj.sampling_params)
        params.normalize(self.tokenizer)
        return SimpleNamespace(sampling_params=params)

    monkeypatch.setattr(TokenizerManager, "_create_tokenized_object", created)
    manager = manager_with()
    manager.tokenizer = SimpleNamespace(encode=encode)
    for given, stops, longest in (("abc", ["abc"], 3), (["a", "bb"], ["a", "bb"], 2), (None, [], 0)):
        obj = SimpleNamespace(sampling_params={"stop": given})
        for _ in range(3):
            params = manager._create_tokenized_object(obj, "", [1]).sampling_params
            assert (params.stop_strs, params.stop_str_max_len) == (stops, longest)
        assert obj.sampling_params == {"stop": given}
    assert encoded == ["abc", "a", "bb"]
