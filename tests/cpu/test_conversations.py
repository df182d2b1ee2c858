"""What no template is filled with, and long conversations beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import bodies, conversations
from sgl_prefill.http.conversations import OFF_LOOP_CHARACTERS

pytestmark = pytest.mark.usefixtures("published")
SAYS = {"role": "user", "content": "Is it so?"}
ANSWERS = {"role": "assistant", "content": "Yes"}


def chat(*messages: dict[str, Any], **options: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="demo", messages=list(messages), **options)


class Serving:
    """Takes down which thread filled a template, with whose tokenizer."""

    def __init__(self, fails: bool = False) -> None:
        self.tokenizer_manager: Any = SimpleNamespace(
            name="ours",
            run_in_thread=self._run_in_thread,
            caller_of=self._caller_of,
        )
        self.filled: list[tuple[threading.Thread, str]] = []
        self._fails = fails

    async def _caller_of(self, _: Any) -> None:
        """The middleware's; nothing here asks who it is."""

    async def _run_in_thread(self, work: Callable[[Any], Any], n_characters: int) -> Any:
        twin = SimpleNamespace(**{**vars(self.tokenizer_manager), "name": "twin"})
        return await asyncio.get_running_loop().run_in_executor(None, work, twin)

    def _process_messages(self, request: ChatCompletionRequest) -> str:
        self.filled.append((threading.current_thread(), self.tokenizer_manager.name))
        if self._fails:
            raise ValueError("roles must alternate")
        return str(request.messages)

    def _convert_to_internal_request(self, request: ChatCompletionRequest, raw_request: Any) -> Any:
        return conversations.around_process_messages(type(self)._process_messages, self, request)


def answer(serving: Serving, request: ChatCompletionRequest) -> Any:
    async def run() -> Any:
        await conversations.render_long_chat(serving, request, None)
        return serving._convert_to_internal_request(request, None)

    return asyncio.run(run())


@pytest.mark.parametrize("extra_characters", [0, -1])
def test_a_long_conversation_is_filled_once_and_beside_the_event_loop(extra_characters: int) -> None:
    empty = chat({"role": "user", "content": ""}).model_dump(exclude_defaults=True)
    n_characters = OFF_LOOP_CHARACTERS - bodies.measure([empty]).characters + extra_characters
    serving, request = Serving(), chat({"role": "user", "content": "x" * n_characters})
    assert answer(serving, request) == str(request.messages)
    [(thread, tokenizer)] = serving.filled
    is_beside = extra_characters == 0
    assert (thread is not threading.main_thread()) == is_beside
    assert tokenizer == ("twin" if is_beside else "ours")


@pytest.mark.parametrize("field", ["reasoning_content", "tools", "tool_calls", "chat_template_kwargs"])
def test_text_that_is_no_content_counts_as_work_of_the_template(field: str) -> None:
    long = "x" * OFF_LOOP_CHARACTERS
    function = {"type": "function", "function": {"name": "f", "description": long, "arguments": long}}
    of_message = {"reasoning_content": long, "tool_calls": [{"id": "1", **function}]}
    of_chat = {"tools": [function], "chat_template_kwargs": {"shown": long}}
    serving = Serving()
    message = {**ANSWERS, field: of_message[field]} if field in of_message else SAYS
    answer(serving, chat(message, SAYS, **({field: of_chat[field]} if field in of_chat else {})))
    assert serving.filled[0][1] == "twin"


def test_a_short_conversation_after_a_long_one_is_its_own() -> None:
    """A batch job reads all its lines in one task: each after a long one was once taken for the long one."""
    serving, long, short = Serving(), chat({"role": "user", "content": "x" * OFF_LOOP_CHARACTERS}), chat(SAYS)

    async def run() -> list[str]:
        said = []
        for request in (long, short):
            await conversations.render_long_chat(cast(Any, serving), request, None)
            said.append(serving._convert_to_internal_request(request, None))
        return said

    assert asyncio.run(run()) == [str(long.messages), str(short.messages)]


def test_what_a_template_refuses_in_the_other_thread_is_refused() -> None:
    serving = Serving(fails=True)
    with pytest.raises(ValueError, match="roles must alternate"):
        answer(serving, chat({"role": "user", "content": "x" * OFF_LOOP_CHARACTERS}))
    assert len(serving.filled) == 1


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (chat(), "messages is empty: give"),
        (chat(ANSWERS, continue_final_message=True), "but for the one that continue_final_message goes on with"),
        (chat(SAYS, chat_template_kwargs={"chat_template": "{{ 1 }}"}), "a template is a program"),
        (chat(SAYS, chat_template_kwargs={"tools": [], "tokenize": False}), "holds tokenize, tools, which SGLang sets"),
        (chat(SAYS, chat_template_kwargs={"truncation": True, "max_length": 5}), "holds max_length, truncation"),
    ],
)
def test_what_no_template_is_filled_with(request_: ChatCompletionRequest, told: str) -> None:
    serving = Serving()
    with pytest.raises(BadRequestError, match=told):
        answer(serving, request_)
    assert not serving.filled


@pytest.mark.parametrize(
    "request_",
    [
        chat(SAYS, ANSWERS, continue_final_message=True),
        chat(ANSWERS),
        chat(SAYS, chat_template_kwargs={"enable_thinking": False}),
        chat(input_ids=[5, 6]),
    ],
)
def test_conversations_that_are_fine(request_: ChatCompletionRequest) -> None:
    assert answer(Serving(), request_) == str(request_.messages)
