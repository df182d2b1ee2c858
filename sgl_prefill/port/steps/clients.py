"""The client of a request, named by a header, the body's `user` or an API key, and sent to the scheduler in `custom_params`.

`http.middleware` makes a `Caller` of each HTTP request before SGLang's code runs. User names are not verified: a public server
needs a proxy that checks them.
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
UNNAMED = ""
SALTS = ("cache_salt", "extra_key")  # fields of a body, in the order in which SGLang joins them
LONGEST_NAME = 256  # characters of a user or a salt, which the prefix cache and the queue keep; of a longer one a hash


@dataclasses.dataclass
class Sent:
    """What the HTTP process has sent to the scheduler of a request with several prompts or samples."""

    has_samples: bool
    rids: list[str] = dataclasses.field(default_factory=list)  # internal ids; answered samples are left out
    client_has_left: bool = False


@dataclasses.dataclass
class Caller:
    """The sender of one HTTP request, and what the middleware adds to the reply."""

    key: str = UNNAMED  # SHA-256 of the API key
    user: str = UNNAMED
    salt: str = ""  # requests share prefixes only where their salts are equal
    has_several_salts: bool = False  # a list, one for each prompt of /generate
    refused_for: str | None = None  # label of the refusal metric
    retry_after_s: int | None = None
    is_background: bool = False  # a background job: runs on capacity that other requests leave
    sent: Sent | None = None  # by the call of SGLang's that runs
    n_prompts: int = 0  # since the last pause between its prompts: see `http.tokenizer_manager`
    n_logprobs: int = 0  # that the prompts of a call of SGLang's have asked for
    is_read: bool = False  # the body may add to the fields above, and has been read

    @classmethod
    def of_headers(cls, headers: Mapping[bytes, bytes]) -> Caller:
        """headers: by lower-case name."""
        user = short(headers.get(HEADER.encode(), b"").decode("latin-1"))
        is_background = headers.get(custom_params.BACKGROUND_HEADER.encode()) == b"1"
        return cls(key_of(headers.get(b"authorization", b"").decode("latin-1")), user, is_background=is_background)

    def turn_of(self, by: str) -> int:
        """Names the client where clients take turns in the HTTP process. by: as --fair-by; with "none" as with "user"."""
        return hash(self.key if by == "key" else (self.key, self.user))

    def name(self, by: str) -> str:
        """by: "user", "key" or "none"."""
        return {"user": self.user, "key": self.key, "none": UNNAMED}[by]

    async def read_body(self, request: fastapi.Request | None) -> None:
        """Adds user, salt and background mark of a JSON body; headers take precedence. Raises BadRequestError."""
        self.is_read = True
        try:
            body = None if request is None else await request.json()
        except (RuntimeError, json.JSONDecodeError, UnicodeDecodeError):  # a form, or an empty body
            return
        if not isinstance(body, dict):
            return
        self.user = self.user or short(_text(body, "user"))
        background = body.get(custom_params.BACKGROUND_FIELD)
        if background is not None and not isinstance(background, bool):
            raise BadRequestError(f"{custom_params.BACKGROUND_FIELD} is {background!r}: it must be true or false")
        self.is_background = self.is_background or background is True
        self.salt = "".join(short(_text(body, name)) for name in SALTS if not isinstance(body.get(name), list))
        self.has_several_salts = any(isinstance(body.get(name), list) for name in SALTS)


CallerOrNone = TypeVar("CallerOrNone", Caller, None)
_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current() -> Caller | None:
    """Returns the sender of the HTTP request that the current task answers; None outside of one."""
    return _caller.get()


@contextmanager
def calling(caller: CallerOrNone) -> Iterator[CallerOrNone]:
    token = _caller.set(caller)
    try:
        yield caller
    finally:
        _caller.reset(token)


def key_of(authorization: str) -> str:
    """Returns the SHA-256 of the key in an Authorization header, UNNAMED without a key."""
    scheme, _, key = authorization.partition(" ")
    key = key if scheme.lower() == "bearer" else authorization
    return hashlib.sha256(key.encode()).hexdigest() if key else UNNAMED


def short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name} is {value!r}: it must be a text")
    return value or ""


def of(req: Req) -> str:
    return custom_params.of(req, PARAMETER) or UNNAMED
