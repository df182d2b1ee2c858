"""JSON bodies, once parsed and before SGLang validates them: limits of what they hold, and prefix handles.

Validating a million parts of a conversation, or filling a template with 30 MB, would stop the event loop for seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import HTTPException
from fastapi.routing import APIRoute

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.request_checks import MOST_LABELS, MOST_PROMPTS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from sgl_prefill.http.prefix_handles import Prefixes
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

MOST_CHARACTERS = 4 << 20  # outside of prompts, with VALUE_CHARACTERS for each value
MOST_PARTS = 8_192  # objects and lists, such as messages, parts of messages and tools: 0.1 s to validate
MOST_PROMPT_PARTS = 65_536  # the same within fields of PROMPTS
DECISIONS = ("/v1/decisions", "/v1/systemone")
MOST_DECISION_PARTS = 131_072  # of a body of these: 400 questions of 255 options are 102,000
VALUE_CHARACTERS = 40  # a template's work for a value, in characters of text
# Fields with their own limits: the number of prompts, and the characters and tokens of each.
PROMPTS = frozenset(
    {
        *(
            "prompt",
            "text",
            "texts",
            "input",
            "input_ids",
            "input_embeds",
            "prompt_parts",
            "query",
            "items",
            "documents",
        ),
        *("tokens", "label_token_ids", "allowed_token_ids", "allowed_tokens", "token_ids_logprob", "sampling_params"),
        *("image_data", "video_data", "audio_data"),
    }
)
PROMPT_DEPTH = 3  # lists in lists of such a field: prompts, tokens, embeddings
LABELS = ("allowed_tokens", "allowed_token_ids", "label_token_ids", "token_ids_logprob")
TEXTS = ("text", "texts", "items", "documents")  # numbers are no prompts of these
STOPS_AT_FIRST = ("input_ids", "prompt", "input_embeds")  # whose validation ends at the first value that is no number
MANY_NUMBERS = 20_000
# What SGLang fills in itself for /v1/score, by what asks for it; wrong values would end the scheduler.
FILLED_IN = {
    "token_indices_to_pool": "score_extraction_token",
    "multi_item_delimiter_indices": "the items",
    "positional_embed_overrides": "the embed overrides",
}
MEDIA = ("url", "data")  # keys of a part of a message whose text no template shows


class Size(NamedTuple):
    characters: int
    parts: int


class Bodies:
    def __init__(self, manager: Callable[[], PrefillTokenizerManager], prefixes: Prefixes) -> None:
        self._manager, self._prefixes = manager, prefixes

    async def read(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with the prefix that it names. Raises BadRequestError. `request` has the body already."""
        manager = self._manager()
        most_parts = MOST_DECISION_PARTS if path_of(request) in DECISIONS else MOST_PARTS
        check(body, max(MOST_CHARACTERS, 8 * manager.longest_input_tokens), most_parts)
        if body.get("prefix") is None:
            return body
        caller = await manager.caller_of(request)
        return self._prefixes.expand(path_of(request), body, manager.tenant_of(caller) + caller.salt)


def route_class(bodies: Bodies, stock: Any) -> type[APIRoute]:
    """The class of routes whose bodies are read by `bodies`. stock: SGLang's class of requests."""

    class CheckedRequest(stock):  # type: ignore[misc]
        async def json(self) -> Any:
            """FastAPI would hide any other exception than HTTPException."""
            if not hasattr(self, "_json"):
                body = await super().json()
                try:
                    self._json = await bodies.read(self, body) if isinstance(body, dict) else body
                except BadRequestError as error:
                    raise HTTPException(error.status, str(error)) from error
            return self._json

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_checked(request: Request) -> Response:
                return await handle(CheckedRequest(request.scope, request.receive))

            return handle_checked

    return CheckedRoute


def path_of(request: Request) -> str:
    """The path of a route, also below a proxy's root path."""
    return request.url.path.removeprefix(request.scope.get("root_path", ""))


def check(body: dict[str, Any], most_characters: int, most_parts: int = MOST_PARTS) -> None:
    """Raises BadRequestError for a body that would take too long to validate or to render, or end the scheduler."""
    for name, asked_by in FILLED_IN.items():
        if body.get(name) is not None:
            raise BadRequestError(f"{name} is filled in by the server: leave it out, and send {asked_by} to /v1/score")
    found = measure([body[name] for name in body.keys() - PROMPTS], most_characters, most_parts)
    if found.characters > most_characters:
        raise BadRequestError(
            f"the request holds more than {most_characters} characters in messages, tools and options, counting"
            f" {VALUE_CHARACTERS} for each value: shorten it"
        )
    n_in_prompts = measure(_objects_of(body), sys.maxsize, MOST_PROMPT_PARTS).parts
    for n, most, where in (
        (found.parts, most_parts, "messages, parts, tools"),
        (n_in_prompts, MOST_PROMPT_PARTS, "prompts"),
    ):
        if n > most:
            raise BadRequestError(
                f"the request holds more than {most} {where} and other objects and lists in them: send fewer in one request"
            )


def measure(values: Iterable[Any], most_characters: int = MOST_CHARACTERS, most_parts: int = MOST_PARTS) -> Size:
    """What JSON values hold, at any depth; counting ends above one of the limits."""
    n_characters = n_parts = 0
    left = list(values)
    while left and n_characters <= most_characters and n_parts <= most_parts:
        value = left.pop()
        n_characters += VALUE_CHARACTERS
        if isinstance(value, str):
            n_characters += len(value)
        elif isinstance(value, dict):
            n_parts += 1
            n_characters += sum(map(len, value))
            left.extend(one for key, one in value.items() if key not in MEDIA or not isinstance(one, str))
        elif isinstance(value, list):
            n_parts += 1
            left.extend(value)
    return Size(n_characters, n_parts)


def _objects_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects in fields of prompts, without their texts. Raises BadRequestError for too many prompts."""
    left = [(body[name], 1, name) for name in PROMPTS if isinstance(body.get(name), list)]
    while left:
        values, depth, name = left.pop()
        if _are_numbers(values, name) and (depth > 1 or name not in TEXTS):
            continue
        most = MOST_LABELS if name in LABELS else MOST_PROMPTS
        if depth == 1 and len(values) > most and name != "input_embeds":
            raise BadRequestError(
                f"{name} holds {len(values)} values, and a request at most {most}: send fewer in one request"
            )
        for one in values:
            if isinstance(one, dict):
                yield {key: None if isinstance(value, str) else value for key, value in one.items()}
            elif isinstance(one, list):
                if depth == PROMPT_DEPTH:
                    raise BadRequestError(f"{name} holds lists in lists, {depth + 1} deep: at most {depth}")
                left.append((one, depth + 1, name))


def _are_numbers(values: list[Any], name: str) -> bool:
    """Of a long list all are looked at: pydantic would make an error of each that is none."""
    if not values or not isinstance(values[0], int | float):
        return False
    return name in STOPS_AT_FIRST or len(values) <= MANY_NUMBERS or {*map(type, values)} <= {int, float}
