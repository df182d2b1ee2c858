"""`keep` on text parts of messages: where a chat template puts them, and what is left of a conversation that is too long."""

from __future__ import annotations

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.api import conversations
from sgl_prefill.api.prompt_parts import MOST_PARTS, CutPrompt, Limit, PartCutter, check_keep, shown
from sgl_prefill.core.prompt_parts import Keep, Span
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    from sgl_prefill.api.tokenizer_manager import PrefillTokenizerManager

PRIVATE_USE = range(0xE000, 0xF900)  # characters that no template knows


class Mark(NamedTuple):
    """A part of a message with `keep`, as the JSON says it."""

    message: int
    part: int
    keep: Any

    @property
    def name(self) -> str:
        return f"messages[{self.message}].content[{self.part}]"


class _Chat(NamedTuple):
    """A filled template."""

    text: str
    add_special_tokens: bool  # what SGLang tokenises it with
    result: Any  # SGLang's, whose `prompt_ids` is not there yet


def marks_of(body: Any) -> tuple[Mark, ...]:
    """Finds the marked parts in the JSON of a chat, whatever its shape."""
    messages = body.get("messages") if isinstance(body, dict) else None
    found = []
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and "keep" in part:
                found.append(Mark(index, place, part["keep"]))
    return tuple(found)


async def cut_chat(
    cutter: PartCutter,
    serving: Any,
    request: ChatCompletionRequest,
    marks: Sequence[Mark],
    raw_request: fastapi.Request | None,
) -> list[dict[str, Any]]:
    """Fills the template of a conversation with marked parts, cuts it where it is too long, and hands the tokens to the
    conversion by `serving` that comes next in this request. Returns what became of each marked part, for the reply.

    Raises BadRequestError.
    """
    cutter.check_has_tokenizer("keep")
    limit, keeps = cutter.limit_of(request), _check(serving, request, marks)
    work = functools.partial(_cut, cutter, serving, request, marks, keeps, raw_request, limit)
    result, parts = await serving.tokenizer_manager.run_beside(work)
    conversations.fill_with(result)
    return parts  # type: ignore[no-any-return]


def _check(serving: Any, request: Any, marks: Sequence[Mark]) -> list[Keep]:
    """Returns what each mark says. Raises BadRequestError for marks that can never be heeded."""
    if len(marks) > MOST_PARTS:
        raise BadRequestError(
            f"messages holds {len(marks)} parts with keep, and {MOST_PARTS} are the limit: mark fewer"
        )
    keeps = []
    for mark in marks:
        part = request.messages[mark.message].content[mark.part]
        if part.type != "text":
            raise BadRequestError(
                f"{mark.name} has keep and is of type {part.type!r}: only texts can be cut, leave it out"
            )
        keeps.append(check_keep(mark.keep, f"{mark.name}.keep"))
    for name in ("input_ids", "continue_final_message"):
        if getattr(request, name):
            raise BadRequestError(f"{name} cannot be combined with keep ({marks[0].name}): leave one of them out")
    if serving.tokenizer_manager.model_config.is_multimodal:
        raise BadRequestError(
            f"{marks[0].name} has keep, and this server's model takes images, whose prompts are not cut: leave keep out, and"
            " shorten the text"
        )
    return keeps


def _cut(
    cutter: PartCutter,
    serving: Any,
    request: ChatCompletionRequest,
    marks: Sequence[Mark],
    keeps: Sequence[Keep],
    raw_request: fastapi.Request | None,
    limit: Limit,
    twin: PrefillTokenizerManager,
) -> tuple[Any, list[dict[str, Any]]]:
    chat = _filled(serving, request, raw_request, twin)
    present = set(chat.text)
    sign = next((character for character in map(chr, PRIVATE_USE) if character not in present), None)
    if sign is None:
        raise BadRequestError("the conversation holds every character of the private use area: leave some out")
    signed = _filled(serving, _signed(request, marks, sign), raw_request, twin)
    places = _places(chat.text, signed.text, request, marks, sign)
    order = sorted((start, end, index) for index, (start, end) in enumerate(places))
    spans = [Span(start, end, keeps[index]) for start, end, index in order]
    found = cutter.cut(
        twin, text=chat.text, spans=spans, limit=limit, name="messages", add_special_tokens=chat.add_special_tokens
    )
    chat.result.prompt_ids = found.token_ids
    return chat.result, _shown(found, marks, [index for _, _, index in order])


def _shown(found: CutPrompt, marks: Sequence[Mark], order: Sequence[int]) -> list[dict[str, Any]]:
    by_mark = dict(zip(order, shown(found), strict=True))
    return [{"message": mark.message, "part": mark.part, **by_mark[index]} for index, mark in enumerate(marks)]


def _filled(serving: Any, request: Any, raw_request: fastapi.Request | None, twin: PrefillTokenizerManager) -> _Chat:
    """Fills a template as SGLang does, and takes down the text that it would tokenise."""
    recorder = _Recorder(twin.tokenizer)
    beside = copy.copy(serving)
    beside.tokenizer_manager = copy.copy(twin)
    beside.tokenizer_manager.tokenizer = recorder
    result = conversations.fill_in_thread(beside, request, raw_request)
    if len(recorder.encoded) != 1:
        raise BadRequestError(
            "messages has parts with keep, and this model's chats are no text that could be cut: leave keep out, and shorten them"
        )
    ((text, options),) = recorder.encoded
    return _Chat(text, options.get("add_special_tokens", True), result)


class _Recorder:
    """A tokenizer that takes down what it shall encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded.append((text, options))
        return []


def _signed(request: Any, marks: Sequence[Mark], sign: str) -> Any:
    """Returns the conversation with signs around each marked text; blanks at its ends, which templates strip, stay outside."""
    messages = list(request.messages)
    for index, mark in enumerate(marks):
        message = messages[mark.message]
        content = list(message.content)
        text = content[mark.part].text
        if stripped := text.strip():
            start = text.index(stripped)
            around = f"{sign}{index}{sign}"
            signed = f"{text[:start]}{around}{stripped}{around}{text[start + len(stripped) :]}"
            content[mark.part] = content[mark.part].model_copy(update={"text": signed})
            messages[mark.message] = message.model_copy(update={"content": content})
    return request.model_copy(update={"messages": messages})


def _places(text: str, signed: str, request: Any, marks: Sequence[Mark], sign: str) -> list[tuple[int, int]]:
    """Returns where the marked texts stand in a filled template, by the signs. Raises BadRequestError where they stand nowhere,
    or the template would write something else."""
    pieces = re.split(f"{sign}(\\d+){sign}", signed)
    found, n_characters = defaultdict[int, list[int]](list), 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        n_characters += len(piece)
        found[int(number)].append(n_characters)
    is_same, places = "".join(pieces[::2]) == text, list[tuple[int, int]]()
    for index, mark in enumerate(marks):
        message = request.messages[mark.message]
        stripped = message.content[mark.part].text.strip()
        if not stripped:
            places.append((0, 0))
            continue
        ends = found[index]
        if len(ends) != 2:
            does = "leaves it out" if not ends else "writes it more than once"
        elif not is_same or text[ends[0] : ends[1]] != stripped:
            does = "changes it, or what stands around it"
        else:
            places.append((ends[0], ends[1]))
            continue
        raise BadRequestError(
            f"{mark.name} has keep, in a message of the role {message.role!r}, and this model's chat template {does}, so that it"
            " cannot be cut: leave keep out there, and shorten it"
        )
    return places
