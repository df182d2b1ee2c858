"""Cutting of long prompts on the routes: replaces texts by tokens that fit, and adds `prompt_parts` to replies."""

from __future__ import annotations

import bisect
import copy
import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import orjson
from fastapi.encoders import jsonable_encoder
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import conversations
from sgl_prefill.http.parted_requests import (
    CUT,
    SHOWN,
    CutPrompt,
    Limit,
    PartedPrompt,
    PartTokenizer,
    check_no_cut_options,
    cut_prompt,
    is_batch,
    limit_of,
    prompts_of,
)
from sgl_prefill.http.scored_prompt import envelope, event_of

if TYPE_CHECKING:
    import fastapi

    from sgl_prefill.http.protocol import LabelChatCompletionRequest, LabelCompletionRequest, LabelGenerateReqInput
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

PartsOfPrompts = list[list[dict[str, Any]]] | None  # None: a request without parts


class CutRequests:
    """Cuts the prompts of requests. All methods raise BadRequestError."""

    def __init__(self, manager: PrefillTokenizerManager) -> None:
        self._manager = manager
        self._tokenizer: PartTokenizer | None = None  # used in the thread for long texts only

    async def of_completion(self, serving: Any, request: LabelCompletionRequest) -> PartsOfPrompts:
        """Cuts `prompt_parts` and sets `prompt` to the tokens. Returns the reply's `prompt_parts` of each prompt."""
        if request.prompt_parts is None:
            check_no_cut_options(request, "give prompt_parts in the place of prompt")
            return None
        if serving.template_manager.completion_template_name is not None:
            raise BadRequestError(
                "prompt_parts cannot be combined with the --completion-template of this server: give prompt"
            )
        request.prompt, parts = await self._cut(request)
        return parts

    async def of_generate(self, obj: LabelGenerateReqInput) -> PartsOfPrompts:
        """As `of_completion`, for `input_ids` of /generate."""
        if obj.prompt_parts is None:
            check_no_cut_options(obj, "give prompt_parts in the place of text")
            return None
        for name in ("text", "input_ids", "input_embeds"):
            if getattr(obj, name) is not None:
                raise BadRequestError(f"{name} and prompt_parts are both given: give the prompt once")
        obj.input_ids, parts = await self._cut(obj)
        return parts

    async def _cut(self, request: Any) -> tuple[Any, PartsOfPrompts]:
        self._check_has_tokenizer("prompt_parts")
        limit, given = limit_of(request, self._manager.longest_input_tokens), request.prompt_parts
        prompts = prompts_of(given)
        self._manager.check_count(len(prompts))
        for name, prompt in prompts.items():
            self._manager.check_text(prompt.text, name, may_be_cut=limit.cuts)
        found = []
        for name, prompt in prompts.items():
            work = functools.partial(self._cut_one, prompt=prompt, limit=limit, name=name)
            found.append(await self._manager.run_in_thread(work, len(prompt.text)))
        ids = [one.token_ids for one in found]
        parts = [[part._asdict() for part in one.cut.parts] for one in found]
        return ids if is_batch(given) else ids[0], parts

    def _cut_one(self, twin: PrefillTokenizerManager, *, prompt: PartedPrompt, limit: Limit, name: str) -> CutPrompt:
        """Runs in the thread for long texts. twin: the copy of the tokenizer manager in it."""
        if self._tokenizer is None:
            self._tokenizer = PartTokenizer(twin.tokenizer)
        return cut_prompt(self._tokenizer.encode(prompt.text), prompt.spans, limit, name)

    def _check_has_tokenizer(self, field: str) -> None:
        if self._manager.tokenizer is None:
            raise BadRequestError(
                f"this server runs without a tokenizer, and {field} is for texts: send the prompt as token ids, at most"
                f" {self._manager.longest_input_tokens}"
            )

    def check_texts_of_chat(self, request: LabelChatCompletionRequest) -> None:
        """Refuses texts that cannot fit before a template is rendered."""
        may_be_cut = bool(request.marks) and request.on_overflow == CUT
        for text in conversations.texts_of(request):
            self._manager.check_text(text, "a message", may_be_cut=may_be_cut)

    async def of_chat(
        self, serving: Any, request: LabelChatCompletionRequest, raw_request: fastapi.Request | None
    ) -> PartsOfPrompts:
        """Renders a long or marked conversation for SGLang's next conversion, without the messages that do not fit."""
        if request.prompt_parts is not None:
            raise BadRequestError(
                'prompt_parts is for prompts, and a chat has messages: mark messages that may be dropped with "keep": false'
            )
        if not request.marks:
            check_no_cut_options(request, 'mark messages that may be dropped with "keep": false')
            await conversations.render_long_chat(serving, request, raw_request)
            return None
        self._check_has_tokenizer("keep")
        name = f"messages[{request.marks[0].message}].keep"
        for field in ("input_ids", "continue_final_message"):
            if getattr(request, field):
                raise BadRequestError(f"{field} cannot be combined with {name}: leave one of them out")
        if self._manager.model_config.is_multimodal:
            raise BadRequestError(f"{name} is for texts, and this server's model takes images: leave keep out")
        limit = limit_of(request, self._manager.longest_input_tokens)
        work = functools.partial(_without_messages, serving, request, raw_request, limit)
        result, n_dropped = await self._manager.run_in_thread(work, sum(map(len, conversations.texts_of(request))))
        conversations.use_rendered(result)
        dropped = _droppable(request)[:n_dropped]
        return [[{"message": mark.message, "dropped": mark.message in dropped} for mark in request.marks]]


def _droppable(request: LabelChatCompletionRequest) -> list[int]:
    return [mark.message for mark in request.marks if not mark.keep]


def _without_messages(
    serving: Any,
    request: LabelChatCompletionRequest,
    raw_request: fastapi.Request | None,
    limit: Limit,
    twin: PrefillTokenizerManager,
) -> tuple[Any, int]:
    """Drops as few as possible of the oldest messages that may be dropped, so that the prompt fits.

    Returns SGLang's rendered template, and the number of dropped messages. Runs in the thread for long texts; twin: the copy of
    the tokenizer manager in it.
    """
    in_thread = copy.copy(serving)
    in_thread.tokenizer_manager = twin
    droppable = _droppable(request)

    @functools.cache
    def rendered(n_dropped: int) -> Any:
        dropped = set(droppable[:n_dropped])
        messages = [message for index, message in enumerate(request.messages) if index not in dropped]
        left = request.model_copy(update={"messages": messages})
        return conversations.render_in_thread(in_thread, left, raw_request)

    def n_tokens(n_dropped: int) -> int:
        result = rendered(n_dropped)
        if not isinstance(result.prompt_ids, list):
            result.prompt_ids = twin.tokenizer.encode(result.prompt_ids)
        return len(result.prompt_ids)

    if n_tokens(0) <= limit.tokens:
        return rendered(0), 0
    if not limit.cuts:
        raise BadRequestError(
            f"messages: the prompt has {n_tokens(0)} tokens, and {limit.name} at most {limit.tokens}: shorten it, or send"
            f' "on_overflow": "{CUT}" and mark messages that may be dropped with "keep": false'
        )
    if n_tokens(len(droppable)) > limit.tokens:
        raise BadRequestError(
            f"messages: without the {len(droppable)} messages that may be dropped the prompt still has"
            f" {n_tokens(len(droppable))} tokens, and {limit.name} at most {limit.tokens}: shorten the others, or mark more of"
            ' them with "keep": false'
        )
    n_dropped = bisect.bisect_left(range(len(droppable)), True, lo=1, key=lambda count: n_tokens(count) <= limit.tokens)
    return rendered(n_dropped), n_dropped


def with_parts(reply: Any, request: Any, parts: PartsOfPrompts) -> Any:
    """Adds `prompt_parts` beside the choices of SGLang's reply; in a stream as the first chunk."""
    if parts is None:
        return reply
    shown = {SHOWN: parts if is_batch(request.prompt_parts or []) else parts[0]}
    if isinstance(reply, BaseModel):
        return Response(orjson.dumps({**jsonable_encoder(reply), **shown}), media_type="application/json")
    if isinstance(reply, StreamingResponse) and reply.status_code < 400:
        first = event_of({**envelope(request, is_chunk=True), "choices": [], **shown})
        reply.body_iterator = _after(first, reply.body_iterator)
    assert isinstance(reply, Response)
    return reply


async def _after(first: bytes, stream: Any) -> AsyncIterator[Any]:
    yield first
    async for chunk in stream:
        yield chunk
