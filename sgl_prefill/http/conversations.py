"""Chat templates: checks before one is rendered, rendering of long chats in another thread, and the shared system prompt."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os.path
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sgl_prefill.errors import BadRequestError, ConfigurationError
from sgl_prefill.http import bodies

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

# Parameters of transformers' `apply_chat_template` that would be given twice, or change what it returns.
SET_BY_SGLANG = frozenset(
    {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
OFF_LOOP_CHARACTERS = 4_000  # some 2 ms to render and tokenise; only in the thread its beginning may be known
_rendered: contextvars.ContextVar[Future[Any] | None] = contextvars.ContextVar("rendered_template", default=None)


def check(request: ChatCompletionRequest) -> None:
    """Raises BadRequestError for a conversation that must not be rendered."""
    from sglang.srt.runtime_context import get_serving

    messages = request.messages
    if "chat_template" in (request.chat_template_kwargs or {}) and not get_serving().trust_request_chat_template:
        raise BadRequestError(
            "chat_template_kwargs holds chat_template, and a template is a program that could block all other requests: leave"
            " it out, or start the server with --chat-template"
        )
    if taken := sorted(SET_BY_SGLANG & (request.chat_template_kwargs or {}).keys()):
        raise BadRequestError(
            f"chat_template_kwargs holds {', '.join(taken)}, which SGLang sets itself when it fills the template: leave out"
            " what is not an argument of the template"
        )
    last_is_continued = request.continue_final_message and messages and messages[-1].role == "assistant"
    if len(messages) == (1 if last_is_continued else 0) and request.input_ids is None:
        why = " but for the one that continue_final_message goes on with" if last_is_continued else ""
        raise BadRequestError(f"messages is empty{why}: give at least one message")


def around_process_messages(
    original: Callable[..., Any], serving: Any, request: ChatCompletionRequest, *arguments: Any, **options: Any
) -> Any:
    """Hook on every route that renders a chat template: runs `check`; uses the result of `render_long_chat` or `use_rendered`."""
    rendered = _rendered.get()
    if rendered is not None and rendered.done():
        return rendered.result()
    try:
        check(request)
        result = original(serving, request, *arguments, **options)
    except Exception as error:
        if rendered is not None:
            rendered.set_exception(error)
        raise
    if rendered is not None:
        rendered.set_result(result)
    return result


async def render_long_chat(
    serving: OpenAIServingBase, request: ChatCompletionRequest, raw_request: fastapi.Request | None
) -> None:
    """Renders and tokenises a long conversation in another thread, for the next conversion by `serving` in this request."""
    _rendered.set(None)  # the task may have rendered another conversation before
    sent = getattr(raw_request, "_json", None)  # what of it a template fills in is not known before
    work = [request.model_dump(exclude_defaults=True)] if sent is None else [sent]
    n_characters = bodies.measure(work).characters
    if n_characters < OFF_LOOP_CHARACTERS:
        return
    manager: PrefillTokenizerManager = serving.tokenizer_manager
    await manager.caller_of(raw_request)
    _rendered.set(Future())
    context = contextvars.copy_context()

    def convert(twin: PrefillTokenizerManager) -> None:
        in_thread = copy.copy(serving)
        in_thread.tokenizer_manager = twin
        with contextlib.suppress(Exception):  # the next conversion raises it too
            context.run(in_thread._convert_to_internal_request, request, raw_request)

    await manager.run_in_thread(convert, n_characters)


def use_rendered(result: Any) -> None:
    """Makes the next conversion in this request take `result` as its rendered template."""
    rendered: Future[Any] = Future()
    rendered.set_result(result)
    _rendered.set(rendered)


def render_in_thread(serving: Any, request: ChatCompletionRequest, raw_request: fastapi.Request | None) -> Any:
    """Returns SGLang's rendered conversation, for `use_rendered`. Raises the errors of the template and of SGLang.

    serving: with a tokenizer of this thread.
    """
    rendered = Future[Any]()
    context = contextvars.copy_context()
    context.run(_rendered.set, rendered)
    try:
        context.run(serving._convert_to_internal_request, request, raw_request)
    except Exception:  # also in `rendered`, if the template raised it
        if not rendered.done():
            raise
    return rendered.result()


def texts_of(request: ChatCompletionRequest) -> Iterator[str]:
    """Yields the texts of the messages and of their parts."""
    for message in request.messages:
        content = getattr(message, "content", None)
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else []:
            if isinstance(text := getattr(part, "text", None), str):
                yield text


async def share_system_prompt(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> None:
    """Computes `--shared-prefix` at start, so that hits on it reveal no tenant's requests: as the beginning of a text and, if the
    model has a chat template, of a chat. Raises ConfigurationError if the prefix cache cannot hold it."""
    prefixes = [manager.tokenizer.encode(text), _common_chat_prefix(manager, serving_chat, text)]
    for tokens in filter(None, prefixes):
        result = await manager.share_prefix(tokens)
        if result.get("evicted_tokens"):
            raise ConfigurationError(
                f"--shared-prefix has {len(tokens)} tokens, and the prefix cache can hold {result['kept_tokens']}: shorten it, or"
                " give the server more memory"
            )


def _common_chat_prefix(manager: PrefillTokenizerManager, serving_chat: Any, text: str) -> list[int]:
    """The tokens that all chats with this system prompt begin with; empty if the template takes no system prompt."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    rendered = []
    for user_text in ("a", "1, 2"):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": user_text}]
        chat = ChatCompletionRequest(model="default", messages=messages, max_tokens=1)
        try:
            obj, _ = serving_chat._convert_to_internal_request(chat, None)
        except (ValueError, TemplateError):  # no chats, or none with a system prompt
            return []
        rendered.append(list(obj.input_ids if obj.input_ids is not None else manager.tokenizer.encode(obj.text)))
    return list(os.path.commonprefix(rendered))
