"""What stands between clients and SGLang's routes: limits on what is read, turns, one shape of errors, and who is still answered.

SGLang answers errors flat (`message`, `type`, `code` at the top), OpenAI nested (`error.message`); clients of both exist, so a
JSON error gets both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi import HTTPException

from sgl_prefill.api.turns import Turns
from sgl_prefill.observability import metric_list
from sgl_prefill.port import client

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sgl_prefill.config import PrefillConfig
    from sgl_prefill.port.ending import Ending

logger = logging.getLogger(__name__)

DATA_PARALLEL_RANK = b"x-data-parallel-rank"
COMPUTING_METHODS = ("POST", "PUT")
# By the status of the answer, for /metrics.
REFUSAL_REASONS = {
    400: "invalid",
    408: "body_too_slow",
    413: "body_too_large",
    429: "deadline_unreachable",
    503: "overloaded",
    504: "deadline_expired",
}
TELLING = ("message", "detail", "error_message", "error")  # fields of errors, by who writes them
INTERNAL_ERROR = "the server failed at this request; its log says at what"


class Refusal(NamedTuple):
    """An answer of ours in the place of SGLang's."""

    status: HTTPStatus
    kind: str
    message: str

    @property
    def flat(self) -> dict[str, Any]:
        """Returns the error as SGLang has it."""
        shown = {"message": self.message, "type": self.kind, "param": None, "code": int(self.status)}
        return {"object": "error", **shown}

    def headers_and_body(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        body = with_nested_error(orjson.dumps(self.flat))
        return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], body


class HttpShield:
    """ASGI middleware around all else.

    Args:
        check_body: raises BadRequestError for what need not be parsed, by path and body.
        n_refused: counts refusals by reason, beside the metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: PrefillConfig,
        ending: Ending,
        check_body: Callable[[str, bytes], None] | None = None,
        n_refused: Counter[str] | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._ending = ending
        self._check_body = check_body
        self._turns = Turns()
        self._n_refused: Counter[str] = Counter() if n_refused is None else n_refused
        self._refused = metric_list.BY_NAME["refused_requests"].make([])  # SGLang has set its directory by now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with client.calling(client.Caller.of_headers(dict(scope["headers"]))) as caller:
            await self._call(caller, scope, receive, send)

    async def _call(self, caller: client.Caller, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in COMPUTING_METHODS:  # a health probe gets 503 while a server starts: no refusal
            await self._answer(None, scope, receive, send)
        else:
            self._ending.n_in_flight += 1
            try:
                await self._answer(caller, scope, receive, self._counting(caller, send))
            finally:
                self._ending.n_in_flight -= 1

    def _counting(self, caller: client.Caller, send: Send) -> Send:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in REFUSAL_REASONS:
                reason = caller.refused_for or REFUSAL_REASONS[message["status"]]
                self._refused.labels(reason=reason).inc()
                self._n_refused[reason] += 1
                headers: list[tuple[bytes, bytes]] = []
                if self._ending.reason is not None:
                    headers = [_retry_after(self._ending.retry_after_s), (b"connection", b"close")]
                elif caller.retry_after_s is not None:
                    headers = [_retry_after(caller.retry_after_s)]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        return counting_send

    async def _answer(self, caller: client.Caller | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; caller: whose turn it needs, None for those that need none."""
        body = _Body(receive, self._config)
        headers = dict(scope["headers"])
        if (refusal := self._refusal(scope["method"], headers)) is not None:
            await _refuse(refusal, body, send)
            return
        answer = _Answer(send, body)
        try:
            if caller is not None:
                await self._take_turn(caller, scope, body)
            await self._app(scope, body.receive, answer.send)
            assert not answer.is_of_an_error, "the error comes after its answer"
        except Exception as error:
            if body.refusal is None and not answer.has_begun:
                await _refuse(refusal_of(error), body, send)
            elif body.refusal is None:
                raise
        finally:
            client.end_turn()
        if body.refusal is not None and not answer.has_begun:
            await _refuse(body.refusal, body, send)

    async def _take_turn(self, caller: client.Caller, scope: Scope, body: _Body) -> None:
        """Waits for the client's bytes before its turn: a slow one keeps nobody waiting."""
        whole = await body.read()
        host, _ = scope.get("client") or ("", 0)
        caller.turn = await self._turns.take(caller.user or caller.key or host)
        if self._check_body is not None:
            self._check_body(scope["path"], whole)

    def _refusal(self, method: str, headers: dict[bytes, bytes]) -> Refusal | None:
        """Says why a request is not even read; None where it is."""
        if method in COMPUTING_METHODS and self._ending.reason is not None:
            text = f"{self._ending.reason}: send the request again, to another server or later"
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", text)
        if not headers.get(b"authorization", b"").isascii():  # SGLang's comparison of keys fails at it
            return Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", "the Authorization header holds what is no ASCII")
        if not (
            rank := headers.get(DATA_PARALLEL_RANK, b"0")
        ).isdigit():  # which some of SGLang's routes take for a failure
            text = f"the header {DATA_PARALLEL_RANK.decode()} is {rank.decode('latin-1')!r}: it must be a whole number"
            return Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", text)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._config.max_body_bytes:
            return _too_large(int(declared), self._config)
        return None


def _retry_after(seconds: int) -> tuple[bytes, bytes]:
    return b"retry-after", str(seconds).encode()


def _too_large(n_bytes: int, config: PrefillConfig) -> Refusal:
    text = (
        f"the request body has {n_bytes} bytes or more, and this server takes at most {config.max_body_bytes}:"
        " send fewer prompts in one request, or start the server with a larger --max-body-mb"
    )
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestTooLarge", text)


def refusal_of(error: BaseException) -> Refusal:
    """Says what an error means that comes before anything was answered, as of a stream that cannot begin. By SGLang's convention
    a ValueError is the client's."""
    error = _unwrapped(error)
    if isinstance(error, HTTPException):
        return Refusal(HTTPStatus(error.status_code), HTTPStatus(error.status_code).phrase, str(error.detail))
    if isinstance(error, ValueError):
        return Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error))
    logger.exception("a request failed", exc_info=error)
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", INTERNAL_ERROR)


def _unwrapped(error: BaseException) -> BaseException:
    """Takes off what Starlette puts around an error: groups of one, and that it came after the head of an answer."""
    while True:
        inner: Sequence[BaseException] = getattr(error, "exceptions", ())
        if len(inner) == 1:
            error = inner[0]
        elif type(error) is RuntimeError and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


class _Body:
    """A request's body as it comes in, within limits of size and time."""

    def __init__(self, receive: Receive, config: PrefillConfig) -> None:
        self._receive = receive
        self._config = config
        self._n_bytes = 0
        self._deadline = time.monotonic() + config.body_timeout_s
        self._is_read = False
        self._kept: Message | None = None  # the body whole, for the app
        self.refusal: Refusal | None = None  # where a limit was passed

    async def read(self) -> bytes:
        """Reads all, keeps it for the app, and returns it; nothing where the client has left."""
        parts = []
        while not self._is_read:
            message = await self.receive()
            parts.append(message.get("body", b""))
        whole = b"".join(parts)
        is_left = message["type"] != "http.request"
        self._kept = message if is_left else {"type": "http.request", "body": whole, "more_body": False}
        return b"" if is_left else whole

    async def receive(self) -> Message:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        if self._is_read:
            return await self._receive()  # that the client has left
        try:
            async with asyncio.timeout(max(self._deadline - time.monotonic(), 0)):
                message = await self._receive()
        except TimeoutError:
            text = (
                f"the request body had not come whole after --body-timeout-s {self._config.body_timeout_s:g}: send it"
                " faster, or in several requests"
            )
            self.refusal, self._is_read = Refusal(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeout", text), True
            raise _BodyRefusedError from None
        self._n_bytes += len(message.get("body", b""))
        self._is_read = message["type"] != "http.request" or not message.get("more_body", False)
        if self._n_bytes > self._config.max_body_bytes:
            self.refusal = _too_large(self._n_bytes, self._config)
            raise _BodyRefusedError
        return message

    async def skip(self) -> None:
        """Reads and drops what the client still sends: closing early would show it a broken pipe, and no answer."""
        self._n_bytes = -(1 << 62)
        while not self._is_read:
            try:
                await self.receive()
            except _BodyRefusedError:
                return


class _BodyRefusedError(Exception):
    """Ends the reading of a body inside the wrapped app; never leaves this module."""


async def _refuse(refusal: Refusal, body: _Body, send: Send) -> None:
    await body.skip()
    headers, text = refusal.headers_and_body()
    if refusal.status == HTTPStatus.REQUEST_TIMEOUT:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": int(refusal.status), "headers": headers})
    await send({"type": "http.response.body", "body": text})


class _Answer:
    """What the app sends: held back until its first byte is there, since a stream may fail before it; errors in our shape."""

    def __init__(self, send: Send, body: _Body) -> None:
        self._send = send
        self._body = body
        self._start: Message | None = None  # held back
        self.is_of_an_error = False  # Starlette's, which hands the error on: that says more
        self._error = b""
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if self._body.refusal is not None and not self.has_begun:
            return  # FastAPI answers any error in reading a body with a text of its own; ours comes instead
        if message["type"] == "http.response.start":
            self._start = message
            is_text = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/plain")
            self.is_of_an_error = is_text and message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR
            return
        if self.is_of_an_error:
            return
        if self._start is not None and message["type"] == "http.response.body":
            if self._start["status"] >= HTTPStatus.BAD_REQUEST:
                self._error += message.get("body", b"")
                if message.get("more_body", False):
                    return
                self._start, message = _in_our_shape(self._start, self._error)
            elif not message.get("body") and message.get("more_body", False):
                return
            start, self._start, self.has_begun = self._start, None, True
            await self._send(start)
        await self._send(message)


def _in_our_shape(start: Message, body: bytes) -> tuple[Message, Message]:
    if start["status"] == HTTPStatus.NOT_IMPLEMENTED:  # SGLang's for what a route does not know, such as a stream
        start = {**start, "status": int(HTTPStatus.BAD_REQUEST)}
    content_type = dict(start["headers"]).get(b"content-type", b"")
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    if content_type.startswith(b"application/json"):
        body = with_nested_error(body)
        headers.append((b"content-length", str(len(body)).encode()))
    elif start["status"] == HTTPStatus.INTERNAL_SERVER_ERROR:
        headers, body = Refusal(
            HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", INTERNAL_ERROR
        ).headers_and_body()
    else:
        headers.append((b"content-length", str(len(body)).encode()))
    return {**start, "headers": headers}, {"type": "http.response.body", "body": body}


def with_nested_error(body: bytes) -> bytes:
    """Adds OpenAI's `error` object to an error of SGLang's or FastAPI's."""
    try:
        flat = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(flat, dict) or isinstance(flat.get("error"), dict):
        return body
    told = next((text for name in TELLING if isinstance(text := flat.get(name), str)), None)
    if told is None:
        return body
    flat.setdefault("message", told)
    nested = {key: flat.get(key) for key in ("message", "type", "param", "code")}
    return orjson.dumps({**flat, "error": nested})
