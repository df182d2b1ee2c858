"""Prefix handles: a client sends the common beginning of its prompts once, and then only an id of it and the rest.

The id is a hash of content and tenant. A prefix that was forgotten is a 409, which the client answers by sending it again.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, Field

from sgl_prefill.errors import BadRequestError, UnknownPrefixError
from sgl_prefill.http.token_ids import InputIds, TokenIds, shown

MOST_BYTES, MOST_PREFIXES = 64 << 20, 4096
PINNED_SHARE = 0.5  # of these, for prefixes with a time to live
LONGEST_TTL_S = 24 * 3600.0
ID_START = "prefix-"
ENTRY_BYTES = 1000  # of a prefix without its content
TOKEN_BYTES = 48  # of a token id as an object, in a list and in an array

TEXT, MESSAGES, INPUT_IDS = KINDS = "text", "messages", "input_ids"
# The field of a request that a prefix comes before, by route and kind.
FIELDS: dict[str, dict[str, str]] = {
    "/generate": {TEXT: "text", INPUT_IDS: "input_ids"},
    "/v1/completions": {TEXT: "prompt", INPUT_IDS: "prompt"},
    "/v1/chat/completions": {MESSAGES: "messages"},
    "/v1/score": {TEXT: "query", INPUT_IDS: "query"},
    "/v1/decisions": {TEXT: "input"},
    "/v1/systemone": {TEXT: "state"},
    **{path: {TEXT: "query"} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}


class PrefixRequest(BaseModel):
    """The body of /v1/prefixes, besides `user` and salts."""

    text: str | None = None
    messages: list[Any] | None = None  # validated as those of a chat
    input_ids: InputIds = None
    ttl_s: float | None = Field(None, gt=0, le=LONGEST_TTL_S)

    def content(self) -> tuple[str, Any]:
        """The kind and the prefix. Raises BadRequestError."""
        given = [(kind, value) for kind in KINDS if (value := getattr(self, kind)) is not None]
        if len(given) != 1:
            raise BadRequestError(f"give one of {', '.join(KINDS)}; the request has {len(given)} of them")
        kind, value = given[0]
        if not value or (kind == INPUT_IDS and not isinstance(value, TokenIds)):
            raise BadRequestError(f"{kind} is empty, or holds several prompts: give one prefix")
        return kind, value


class Prefix(NamedTuple):
    id: str
    tenant: str
    kind: str
    value: Any  # a text, the JSON of messages, or TokenIds
    n_bytes: int
    pinned_until_s: float  # monotonic; 0: not pinned


class Prefixes:
    """The prefixes of all tenants, least recently used first.

    Args:
        most_expanded_bytes: of the prompts of one request with their prefix; 8 for a token id.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_expanded_bytes: int = 32 << 20) -> None:
        self._most_bytes, self._most_expanded_bytes = most_bytes, most_expanded_bytes
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self.n_bytes = 0

    def make(self, tenant: str, kind: str, value: Any, ttl_s: float | None = None) -> Prefix:
        """Makes a prefix for `hold`. Raises BadRequestError if it is too large, or too much is held for a time."""
        now_s = time.monotonic()
        try:
            content = orjson.dumps([tenant, kind, value])
        except TypeError as error:  # nested too deeply, or half of a surrogate pair
            raise BadRequestError(f"{kind} cannot be written as JSON: {error}") from error
        found = ID_START + hashlib.sha256(content).hexdigest()[:32]
        n_bytes = ENTRY_BYTES + 2 * len(content) + (TOKEN_BYTES * len(value) if kind == INPUT_IDS else 0)
        pinned = sum(one.n_bytes for one in self._held.values() if one.pinned_until_s > now_s and one.id != found)
        for what, held, most in (
            ("this prefix takes", n_bytes, self._most_bytes),
            (
                "prefixes with ttl_s would take",
                (pinned + n_bytes) * (ttl_s is not None),
                self._most_bytes * PINNED_SHARE,
            ),
        ):
            if held > most:
                raise BadRequestError(
                    f"{what} {held} bytes, and this server holds at most {most:.0f}: shorten it, or leave ttl_s out"
                )
        until_s = 0.0 if ttl_s is None else now_s + ttl_s
        return Prefix(found, tenant, kind, orjson.dumps(value) if kind == MESSAGES else value, n_bytes, until_s)

    def hold(self, prefix: Prefix) -> None:
        """Holds a prefix until its time is over and others need the memory."""
        if (old := self._held.pop(prefix.id, None)) is not None:
            self.n_bytes -= old.n_bytes
            prefix = prefix._replace(pinned_until_s=max(prefix.pinned_until_s, old.pinned_until_s))
        self._held[prefix.id] = prefix
        self.n_bytes += prefix.n_bytes
        now_s = time.monotonic()
        for one in list(self._held.values())[:-1]:
            if self.n_bytes <= self._most_bytes and len(self._held) <= MOST_PREFIXES:
                break
            if one.pinned_until_s <= now_s:
                self.n_bytes -= self._held.pop(one.id).n_bytes

    def __contains__(self, prefix_id: str) -> bool:
        return prefix_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def expand(self, path: str, body: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Puts the prefix that a body names in front of its prompts. Raises BadRequestError."""
        name = body["prefix"]
        if not isinstance(name, str) or not name:
            raise BadRequestError(f"prefix is {shown(name)}: give the id that /v1/prefixes has returned")
        fields = FIELDS.get(path)
        if fields is None:
            raise BadRequestError(f"prefix is {shown(name)}, and {path} takes none: send the whole prompt")
        prefix = self._held.get(name)
        if prefix is None or prefix.tenant != tenant:
            raise UnknownPrefixError(f"prefix {shown(name)} is not held here: send it to /v1/prefixes again")
        self._held.move_to_end(prefix.id)
        field = fields.get(prefix.kind)
        if field is None:
            raise BadRequestError(
                f"prefix {name} was made of {prefix.kind}, and {path} takes one that was made of {' or '.join(fields)}"
            )
        if prefix.kind == MESSAGES and body.get("input_ids") is not None:
            raise BadRequestError(
                "prefix and input_ids are both given, and a chat is made of one of them: leave the other out"
            )
        own = body.get(field)
        n_prompts = len(own) if isinstance(own, list) and own and isinstance(own[0], str | list) else 1
        n_bytes = n_prompts * (8 * len(prefix.value) if prefix.kind == INPUT_IDS else len(prefix.value))
        if n_bytes > self._most_expanded_bytes:
            raise BadRequestError(
                f"{n_prompts} prompts behind this prefix are {n_bytes} bytes, and a request may be {self._most_expanded_bytes}:"
                " send fewer prompts in one request, or start the server with a larger --max-body-mb"
            )
        rest = {key: value for key, value in body.items() if key != "prefix"}
        return {**rest, field: joined(prefix, own, field)}


def joined(prefix: Prefix, own: Any, field: str) -> Any:
    """A request's own prompt, prompts or messages behind the prefix. Raises BadRequestError."""
    if prefix.kind == MESSAGES:
        messages = orjson.loads(prefix.value)
        if isinstance(own, list | None):
            return [*messages, *(own or [])]
        raise BadRequestError(f"{field} is {shown(own)}: behind prefix {prefix.id} give a list of messages")
    if own is None:
        return prefix.value
    if prefix.kind == TEXT:
        if isinstance(own, str):
            return prefix.value + own
        if isinstance(own, list) and all(isinstance(one, str) for one in own):
            return [prefix.value + one for one in own]
        wanted = "a text, or a list of texts"
    else:
        try:
            if isinstance(own, list):
                lists = own and isinstance(own[0], list)
                return [prefix.value.followed_by(one) for one in own] if lists else prefix.value.followed_by(own)
        except (TypeError, OverflowError):
            pass  # the same message
        wanted = "a list of token ids, or a list of such lists"
    raise BadRequestError(
        f"{field} is not what goes with prefix {prefix.id}, which was made of {prefix.kind}: give {wanted}"
    )
