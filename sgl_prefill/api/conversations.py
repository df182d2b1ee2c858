"""Conversations: what cannot become a prompt is refused before a template is filled, and long ones are filled beside the event
loop.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sgl_prefill.api.text_limit import OFF_LOOP_CHARACTERS
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

PART_CHARACTERS = 40  # of the work of a template, for a message or a part of one, whatever it says
FEWEST_PARTS = 4_096  # that are too many for one request, however short its prompt may be
# Of JSON, where it is no text of a client's: there a quote is escaped.
ROLE, TYPE = b'"role"', b'"type"'
_filled: contextvars.ContextVar[Future[Any] | None] = contextvars.ContextVar("filled_template", default=None)


def check_size(body: bytes, longest_input_tokens: int) -> None:
    """Raise BadRequestError for the JSON of a conversation that cannot fit, before it is parsed: each part takes a token."""
    most = max(longest_input_tokens, FEWEST_PARTS)
    for name, things in ((ROLE, "messages"), (TYPE, "parts and tools")):
        if (n := body.count(name)) > most:
            raise BadRequestError(
                f"the request holds {n} {things}, and this server takes at most {most}"
                f" ({longest_input_tokens} tokens): shorten it"
            )


def check(request: ChatCompletionRequest, longest_input_tokens: int) -> None:
    """Raise BadRequestError for a conversation that no template shall be filled with."""
    messages = request.messages
    if "chat_template" in (request.chat_template_kwargs or {}):
        raise BadRequestError(
            "chat_template_kwargs holds chat_template, and a template is a program that all others would wait for: leave it"
            " out, or start the server with --chat-template"
        )
    if len(messages) > (most := max(longest_input_tokens, FEWEST_PARTS)):
        raise BadRequestError(f"the request holds {len(messages)} messages, and this server takes at most {most}")
    last_is_continued = request.continue_final_message and messages and messages[-1].role == "assistant"
    if len(messages) == (1 if last_is_continued else 0) and request.input_ids is None:
        why = " but for the one that continue_final_message goes on with" if last_is_continued else ""
        raise BadRequestError(f"messages is empty{why}: give at least one message")


def around_process_messages(
    original: Callable[..., Any], serving: Any, request: ChatCompletionRequest, *arguments: Any, **options: Any
) -> Any:
    """Hook: refuses what `check` refuses, on every route that fills a template; what `fill_beside` has filled is taken as it
    is."""
    filled = _filled.get()
    if filled is not None and filled.done():
        return filled.result()
    try:
        check(request, serving.tokenizer_manager.longest_input_tokens)
        result = original(serving, request, *arguments, **options)
    except Exception as error:
        if filled is not None:
            filled.set_exception(error)
        raise
    if filled is not None:
        filled.set_result(result)
    return result


async def fill_beside(
    serving: OpenAIServingBase, request: ChatCompletionRequest, raw_request: fastapi.Request | None
) -> None:
    """Fills the template of a long conversation and tokenises it in another thread, for the conversion by `serving` that
    comes next in this request."""
    _filled.set(None)  # the task may have filled another before
    if work_characters(request) < OFF_LOOP_CHARACTERS:
        return
    manager: PrefillTokenizerManager = serving.tokenizer_manager
    _filled.set(Future())
    context = contextvars.copy_context()

    def convert(twin: PrefillTokenizerManager) -> None:
        beside = copy.copy(serving)
        beside.tokenizer_manager = twin
        with contextlib.suppress(Exception):  # which the conversion that comes next meets too
            context.run(beside._convert_to_internal_request, request, raw_request)

    await manager.run_beside(convert)


def fill_with(result: Any) -> None:
    """Makes the conversion that comes next in this request take `result` for what fills its template."""
    filled: Future[Any] = Future()
    filled.set_result(result)
    _filled.set(filled)


def fill_in_thread(serving: Any, request: ChatCompletionRequest, raw_request: fastapi.Request | None) -> Any:
    """Returns what SGLang makes of a conversation, for `fill_with`; in a thread beside the event loop, with a `serving` whose
    tokenizer is this thread's. Raises what a template or SGLang refuses."""
    filled = Future[Any]()
    context = contextvars.copy_context()
    context.run(_filled.set, filled)
    try:
        context.run(serving._convert_to_internal_request, request, raw_request)
    except Exception:  # which the conversion that comes next meets too
        if not filled.done():
            raise
    return filled.result()


def work_characters(request: ChatCompletionRequest) -> int:
    """Returns how long a text would be that takes as much of a template's and a tokenizer's time as a conversation."""
    texts = list(texts_of(request))
    return sum(map(len, texts)) + PART_CHARACTERS * (len(texts) + len(request.tools or ()))


def texts_of(request: ChatCompletionRequest) -> Iterator[str]:
    """Yields what a chat says."""
    for message in request.messages:
        content = getattr(message, "content", None)
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else []:
            if isinstance(text := getattr(part, "text", None), str):
                yield text
