"""JSON bodies, once parsed and before SGLang validates them: limits of what they hold, and prefix handles.

Validating a million parts of a conversation, or filling a template with 30 MB, would stop the event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import HTTPException
from fastapi.routing import APIRoute

from sgl_prefill.errors import BadRequestError
from sgl_prefill.http.request_checks import MOST_PROMPTS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from sgl_prefill.http.prefix_handles import Prefixes
    from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

MOST_CHARACTERS = 4 << 20  # outside of prompts, with VALUE_CHARACTERS for each value
MOST_PARTS = 16_384  # objects and lists, such as messages, parts of messages and tools
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
        *("tokens", "label_token_ids", "allowed_token_ids", "allowed_tokens", "token_ids_logprob"),
    }
)
PROMPT_DEPTH = 3  # lists in lists of such a field: prompts, tokens, embeddings


class Size(NamedTuple):
    characters: int
    parts: int


class Bodies:
    def __init__(self, manager: Callable[[], PrefillTokenizerManager], prefixes: Prefixes) -> None:
        self._manager, self._prefixes = manager, prefixes

    async def read(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with the prefix that it names. Raises BadRequestError. `request` has the body already."""
        manager = self._manager()
        check(body, max(MOST_CHARACTERS, 8 * manager.longest_input_tokens))
        if body.get("prefix") is None:
            return body
        caller = await manager.caller_of(request)
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        return self._prefixes.expand(path, body, manager.tenant_of(caller) + caller.salt)


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


def check(body: dict[str, Any], most_characters: int) -> None:
    """Raises BadRequestError for a body that would take too long to validate or to render."""
    outside = [body[name] for name in body.keys() - PROMPTS]
    found = measure(outside, most_characters)
    n_parts = found.parts + measure(_objects_of(body), most_characters).parts
    if found.characters > most_characters:
        raise BadRequestError(
            f"the request holds more than {most_characters} characters in messages, tools and options, counting"
            f" {VALUE_CHARACTERS} for each value: shorten it"
        )
    if n_parts > MOST_PARTS:
        raise BadRequestError(
            f"the request holds more than {MOST_PARTS} messages, parts, tools and other objects and lists: shorten it"
        )


def measure(values: Iterable[Any], most_characters: int = MOST_CHARACTERS) -> Size:
    """What JSON values hold, at any depth; counting ends above one of the limits."""
    n_characters = n_parts = 0
    left = list(values)
    while left and n_characters <= most_characters and n_parts <= MOST_PARTS:
        value = left.pop()
        n_characters += VALUE_CHARACTERS
        if isinstance(value, str):
            n_characters += len(value)
        elif isinstance(value, dict):
            n_parts += 1
            n_characters += sum(map(len, value))
            left.extend(value.values())
        elif isinstance(value, list):
            n_parts += 1
            left.extend(value)
    return Size(n_characters, n_parts)


def _objects_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects in fields of prompts, without their texts. Raises BadRequestError for too many prompts."""
    left = [(body[name], 1, name) for name in PROMPTS if isinstance(body.get(name), list)]
    while left:
        values, depth, name = left.pop()
        if not values or isinstance(values[0], int | float):
            continue
        if depth == 1 and len(values) > MOST_PROMPTS and not name.startswith("allowed"):
            raise BadRequestError(
                f"{name} holds {len(values)} values, and a request at most {MOST_PROMPTS}: send fewer in one request"
            )
        for one in values:
            if isinstance(one, dict):
                yield {key: None if isinstance(value, str) else value for key, value in one.items()}
            elif isinstance(one, list):
                if depth == PROMPT_DEPTH:
                    raise BadRequestError(f"{name} holds lists in lists, {depth + 1} deep: at most {depth}")
                left.append((one, depth + 1, name))
