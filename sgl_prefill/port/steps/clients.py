"""Who asks: by a header, by the body's `user` or by an API key, and from there in SGLang's `custom_params`.

`http.middleware` makes a `Caller` of each HTTP request, before SGLang's code, so that no route can lose it. User names are
believed: a server that strangers reach needs a proxy that checks them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_prefill.errors import BadRequestError
from sgl_prefill.port.steps import custom_params

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.schedule_batch import Req

HEADER = "x-user-id"
PARAMETER = f"{custom_params.OURS}client"
NOBODY = ""
SALTS = ("cache_salt", "extra_key")  # of a body, in SGLang's order


@dataclasses.dataclass
class Caller:
    """Who sent one HTTP request, and what its answer shall say of it."""

    key: str = NOBODY  # a hash of the API key
    user: str = NOBODY
    salt: str = ""  # what the body says of the prefixes that it shares
    refused_for: str | None = None  # in a word, for metrics
    retry_after_s: int | None = None
    is_background: bool = False  # the request is of a job that takes what others leave

    @classmethod
    def of_headers(cls, headers: Mapping[bytes, bytes]) -> Caller:
        """Reads what HTTP tells; headers: by lower-case name."""
        user = headers.get(HEADER.encode(), b"").decode("latin-1")
        is_background = headers.get(custom_params.BACKGROUND_HEADER.encode()) == b"1"
        return cls(key_of(headers.get(b"authorization", b"").decode("latin-1")), user, is_background=is_background)

    def name(self, by: str) -> str:
        """Returns the client, NOBODY where none is named. by: "user", "key" or "none"."""
        return {"user": self.user, "key": self.key, "none": NOBODY}[by]

    async def read_body(self, request: fastapi.Request | None) -> None:
        """Adds what the body says: the header comes first. Its JSON has been parsed for the route. Raises BadRequestError."""
        try:
            body = None if request is None else await request.json()
        except (RuntimeError, json.JSONDecodeError, UnicodeDecodeError):  # a form, or nothing
            return
        if not isinstance(body, dict):
            return
        self.user = self.user or _text(body, "user")
        if (said := body.get(custom_params.BACKGROUND_FIELD)) is not None and not isinstance(said, bool):
            raise BadRequestError(f"{custom_params.BACKGROUND_FIELD} is {said!r}: it must be true or false")
        self.is_background = self.is_background or said is True
        self.salt = "".join(_text(body, name) for name in SALTS if not isinstance(body.get(name), list))


CallerOrNone = TypeVar("CallerOrNone", Caller, None)
_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current() -> Caller | None:
    """Returns who sent the HTTP request that is being answered; None outside of one."""
    return _caller.get()


@contextmanager
def calling(caller: CallerOrNone) -> Iterator[CallerOrNone]:
    """Within this, `current` is this one."""
    token = _caller.set(caller)
    try:
        yield caller
    finally:
        _caller.reset(token)


def key_of(authorization: str) -> str:
    """Returns a hash of the key in an Authorization header, NOBODY where there is none."""
    scheme, _, key = authorization.partition(" ")
    key = key if scheme.lower() == "bearer" else authorization
    return hashlib.sha256(key.encode()).hexdigest() if key else NOBODY


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name} is {value!r}: it must be a text")
    return value or ""


def of(req: Req) -> str:
    return custom_params.of(req, PARAMETER) or NOBODY
