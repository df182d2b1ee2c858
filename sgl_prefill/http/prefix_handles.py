"""Prefix handles: a client sends the common beginning of its prompts once, and then only an id of it and the rest.

The id is a hash of content and tenant. A prefix that was forgotten is a 409, which the client answers by sending it again.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, Field, PlainValidator

from sgl_prefill.errors import BadRequestError, UnknownPrefixError
from sgl_prefill.http import token_ids
from sgl_prefill.http.token_ids import TokenIds

MOST_BYTES = 64 << 20
PINNED_SHARE = 0.5  # of these, for prefixes with a time to live
LONGEST_TTL_S = 24 * 3600.0
ID_START = "prefix-"
TOKEN_BYTES = 48  # of a token id as an object, in a list and in an array

TEXT, MESSAGES, INPUT_IDS = KINDS = "text", "messages", "input_ids"
# The field of a request that a prefix comes before, by route and kind.
FIELDS: dict[str, dict[str, str]] = {
    "/generate": {TEXT: "text", INPUT_IDS: "input_ids"},
    "/v1/completions": {TEXT: "prompt", INPUT_IDS: "prompt"},
    "/v1/chat/completions": {MESSAGES: "messages"},
    "/v1/score": {TEXT: "query", INPUT_IDS: "query"},
    **{path: {TEXT: "query"} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}


class PrefixRequest(BaseModel):
    """The body of /v1/prefixes, besides `user` and salts."""

    text: str | None = None
    messages: list[Any] | None = None  # validated as those of a chat
    input_ids: Annotated[Any, PlainValidator(token_ids.read, json_schema_input_type=list[int] | None)] = None
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
    value: Any  # a text, messages or TokenIds
    n_bytes: int
    pinned_until_s: float  # monotonic; 0: not pinned


class Prefixes:
    """The prefixes of all tenants, least recently used first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._n_bytes = 0

    def add(self, tenant: str, kind: str, value: Any, ttl_s: float | None = None) -> Prefix:
        """Holds a prefix, at least for `ttl_s`. Raises BadRequestError if it is too large, or too much is held for a time."""
        now_s = time.monotonic()
        content = orjson.dumps([tenant, kind, value])
        found = ID_START + hashlib.sha256(content).hexdigest()[:32]
        n_bytes = TOKEN_BYTES * len(value) if kind == INPUT_IDS else sys.getsizeof(value) + 2 * len(content)
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
        if (old := self._held.pop(found, None)) is not None:
            self._n_bytes -= old.n_bytes
        until_s = max(now_s + (ttl_s or 0), old.pinned_until_s if old else 0)
        prefix = Prefix(found, tenant, kind, value, n_bytes, until_s if ttl_s is not None or old else 0)
        self._held[found] = prefix
        self._n_bytes += n_bytes
        for one in list(self._held.values()):
            if self._n_bytes <= self._most_bytes:
                break
            if one is not prefix and one.pinned_until_s <= now_s:
                self._n_bytes -= self._held.pop(one.id).n_bytes
        return prefix

    def __contains__(self, prefix_id: str) -> bool:
        return prefix_id in self._held

    def state(self) -> dict[str, int]:
        """For /server_info."""
        return {"prefixes": len(self._held), "held_bytes": self._n_bytes}

    def expand(self, path: str, body: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Puts the prefix that a body names in front of its prompts. Raises BadRequestError."""
        name = body["prefix"]
        fields = FIELDS.get(path)
        if fields is None:
            raise BadRequestError(f"prefix is {name!r}, and {path} takes none: send the whole prompt")
        prefix = self._held.get(name) if isinstance(name, str) else None
        if prefix is None or prefix.tenant != tenant:
            raise UnknownPrefixError(f"prefix {name!r} is not held here: send it to /v1/prefixes again")
        self._held.move_to_end(prefix.id)
        field = fields.get(prefix.kind)
        if field is None:
            raise BadRequestError(
                f"prefix {name} was made of {prefix.kind}, and {path} takes one that was made of {' or '.join(fields)}"
            )
        rest = {key: value for key, value in body.items() if key != "prefix"}
        return {**rest, field: joined(prefix, body.get(field), field)}


def joined(prefix: Prefix, own: Any, field: str) -> Any:
    """A request's own prompt, prompts or messages behind the prefix. Raises BadRequestError."""
    if own is None:
        return prefix.value
    if prefix.kind == TEXT:
        if isinstance(own, str):
            return prefix.value + own
        if isinstance(own, list) and all(isinstance(one, str) for one in own):
            return [prefix.value + one for one in own]
        wanted = "a text, or a list of texts"
    elif prefix.kind == MESSAGES:
        if isinstance(own, list):
            return [*prefix.value, *own]
        wanted = "a list of messages"
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
