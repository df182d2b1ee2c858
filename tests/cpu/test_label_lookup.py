"""Labels given as text are looked up once a distinct end of a prompt, off the event loop, and others' in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.labels import CONTEXT_CHARACTERS, Label, restrict
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import label_scoring
from sgl_prefill.http.label_scoring import AllowedAnswers, LabelScorer
from sgl_prefill.http.scored_prompt import ScoredPrompt

WAIT_S = 30


class Characters:
    """A tokenizer whose tokens are characters; it counts, and may wait before it encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __deepcopy__(self, _: Any) -> Characters:
        return self

    def encode(self, text: str, **_: Any) -> list[int]:
        assert self.may_go_on.wait(WAIT_S), "the event loop stood still"
        self.encoded.append(text)
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))


def scorer_with(tokenizer: Characters) -> LabelScorer:
    manager: Any = SimpleNamespace(
        tokenizer=tokenizer, model_config=SimpleNamespace(vocab_size=1 << 20), prefill_config=PrefillConfig()
    )
    return LabelScorer(manager)


def labels(n: int) -> list[str]:
    return [chr(0x4E00 + index) for index in range(n)]


def test_the_event_loop_goes_on_while_labels_are_looked_up() -> None:
    tokenizer = Characters()
    tokenizer.may_go_on.clear()

    async def run() -> None:
        asked = asyncio.ensure_future(scorer_with(tokenizer)._resolve(AllowedAnswers(labels(3), None), ["x"]))
        asyncio.get_running_loop().call_later(0, tokenizer.may_go_on.set)
        (found,) = await asked
        assert [label.token_id for label in found] == [ord(label) for label in labels(3)]

    asyncio.run(run())


def test_the_event_loop_goes_on_while_a_reply_of_many_labels_is_written() -> None:
    scorer = scorer_with(Characters())
    names = [Label(name, ord(name)) for name in labels(label_scoring.SLICE + 1)]
    scored = ScoredPrompt(names, restrict([-10.0] * len(names)), {})
    is_written = threading.Event()

    def write(index: int, one: ScoredPrompt) -> dict[str, Any]:
        assert is_written.wait(WAIT_S), "the event loop stood still"
        return {"index": index, "labels": len(one.labels)}

    async def run() -> None:
        loop = asyncio.get_running_loop()
        scorer._manager.run_in_thread = lambda work, _: loop.run_in_executor(None, work, None)  # type: ignore
        loop.call_later(0, is_written.set)
        assert await scorer.written([scored], write) == [{"index": 0, "labels": len(names)}]

    asyncio.run(run())


def test_an_end_that_prompts_or_requests_share_is_looked_up_once() -> None:
    tokenizer = Characters()
    scorer = scorer_with(tokenizer)
    prompts = ["a" * CONTEXT_CHARACTERS, "b" + "a" * CONTEXT_CHARACTERS, "c"]
    for _ in range(2):
        found = asyncio.run(scorer._resolve(AllowedAnswers(["x", "y"], None), prompts))
        assert [[label.token_id for label in of_prompt] for of_prompt in found] == [[ord("x"), ord("y")]] * 3
    assert len(tokenizer.encoded) == 2 * 2 * (1 + 2), (
        "two ends, each alone and with two labels, as given and in their other form"
    )


def test_a_short_look_up_does_not_wait_for_the_end_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_scoring, "SLICE", 10)
    tokenizer = Characters()
    scorer, order = scorer_with(tokenizer), list[str]()

    async def ask(name: str, prompt: str, n_labels: int) -> None:
        await scorer._resolve(AllowedAnswers(labels(n_labels), None), [prompt])
        order.append(name)

    async def run() -> None:
        await asyncio.gather(ask("long", "x", 200), ask("short", "y", 3))

    asyncio.run(run())
    assert order == ["short", "long"]


def test_two_labels_that_are_one_token_are_refused_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_scoring, "SLICE", 2)
    tokenizer = Characters()
    tokenizer.encode = lambda text, **_: [ord(character.lower()) for character in text]  # type: ignore[method-assign]
    with pytest.raises(BadRequestError, match="'a' and 'A' are the same token 97"):
        asyncio.run(scorer_with(tokenizer)._resolve(AllowedAnswers(["a", "b", "c", "A"], None), ["x"]))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_scoring, "MOST_RESOLUTIONS", 10)
    scorer = scorer_with(Characters())
    for n in range(20):
        asyncio.run(scorer._resolve(AllowedAnswers(labels(2 + n % 3), None), [f"prompt {n}"]))
        held = sum(len(of_end) for ends in scorer._known.values() for of_end in ends.values())
        assert held == scorer._n_known <= 10


@pytest.mark.parametrize("field", ["image_data", "video_data", "audio_data"])
def test_labels_after_an_image_are_refused_by_name(field: str) -> None:
    request = GenerateReqInput(text=["a", "b"], **{field: [None, "data:,x"]})
    with pytest.raises(BadRequestError, match=f"the request holds {field} beside allowed_tokens, "):
        asyncio.run(scorer_with(Characters()).score(request, AllowedAnswers(["x", "y"], None)))


def test_labels_that_are_divided_over_requests_end_with_their_client() -> None:
    """Two of three requests are computed; the client leaves while the second one is."""
    asked = list[Any]()

    class Client:
        async def is_disconnected(self) -> bool:
            return len(asked) == 2

    scorer = scorer_with(Characters())

    async def answered(obj: Any, raw_request: Any) -> list[dict[str, Any]]:
        asked.append(obj)
        return [{}]

    scorer._answered = answered  # type: ignore[method-assign]
    requests = [GenerateReqInput(input_ids=[1]) for _ in range(3)]
    client: Any = Client()
    with pytest.raises(fastapi.HTTPException, match="the client has left"):
        asyncio.run(scorer._answered_in_turn(requests, client, None))
    assert len(asked) == 2
    assert len(asyncio.run(scorer._answered_in_turn(requests, None, None))) == 3
