"""ASGI middleware around SGLang's app: body limits, one format of errors, refusals at shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import HTTPException

from sgl_prefill.core import metric_list
from sgl_prefill.http import encoded_bodies
from sgl_prefill.http.error_format import INTERNAL_ERROR, Refusal, as_the_path_has_it, refusal_of
from sgl_prefill.http.fair_turns import FairTurns
from sgl_prefill.port.steps import clients

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from sgl_prefill.config import PrefillConfig
    from sgl_prefill.http.shutdown import Ending

BODY_TIMEOUT_S = 60.0
MOST_SHOWN = 200  # characters of a path
COMPUTING_METHODS = ("POST", "PUT")
# In OpenMetrics prometheus_client writes SGLang's names, which hold a colon, in two ways: a scraper that asks for it gets
# Prometheus' text format.
METRICS_PATH = "/metrics"
# The label `reason` of the metric `refused_requests`, by HTTP status.
REFUSAL_REASONS = {
    400: "invalid",
    408: "body_too_slow",
    413: "body_too_large",
    429: "deadline_unreachable",
    503: "overloaded",
    504: "deadline_expired",
}


class Middleware:
    """The outermost ASGI application of the server.

    Args:
        n_refused: counts refusals by reason, for the dashboard.
        is_known: tells whether a path is served.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: PrefillConfig,
        ending: Ending,
        n_refused: Counter[str] | None = None,
        is_known: Callable[[Scope], bool] = lambda scope: True,
    ) -> None:
        self._app = app
        self._config = config
        self._ending = ending
        self._is_known = is_known
        self._turns = FairTurns()
        self._n_refused: Counter[str] = Counter() if n_refused is None else n_refused
        self._refused = metric_list.BY_NAME["refused_requests"].make([])  # after SGLang has set the metrics' directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        computes = scope["method"] in COMPUTING_METHODS
        with clients.calling(clients.Caller.of_headers(dict(scope["headers"]))) as caller:
            if computes:  # not a health probe, which gets 503 while the server starts
                send = self._counted(caller, send)
            self._ending.n_in_flight += computes
            try:
                await self._answer(scope, receive, send, caller if computes else None)
            finally:
                self._ending.n_in_flight -= computes

    async def _answer(self, scope: Scope, receive: Receive, send: Send, caller: clients.Caller | None) -> None:
        """caller: None for a request that computes nothing."""
        answer = _Answer(send, scope["path"])
        try:
            headers = dict(scope["headers"])
            self._check_length(headers)
            body = await self._read(receive)
            if body is None:
                return
            if not self._is_known(scope):
                raise HTTPException(
                    HTTPStatus.NOT_FOUND,
                    f"{scope['path'][:MOST_SHOWN]} is not a route of this prefill-only server: for answers use /v1/completions,"
                    " /v1/chat/completions, /generate, /v1/score, /v1/rerank or /v1/embeddings; /openapi.json lists all routes",
                )
            if encoding := headers.get(b"content-encoding"):
                limit = self._config.max_body_bytes
                body = await asyncio.to_thread(encoded_bodies.decode, body, encoding.decode("latin-1"), limit)
            kept = _headers_of(scope["headers"], len(body) if encoding else None)
            is_scrape = scope["path"].startswith(METRICS_PATH)
            scope = {**scope, "headers": [one for one in kept if not (is_scrape and one[0] == b"accept")]}
            # SGLang's comparison of keys fails at others.
            if not headers.get(b"authorization", b"").isascii():
                raise HTTPException(HTTPStatus.UNAUTHORIZED, "the Authorization header contains non-ASCII bytes")
            if caller is not None:
                self._check_serves()
                await self._turns.mine(caller.turn_of(self._config.fair_by))
            await self._app(scope, _replay(body, receive), answer.send)
        except Exception as error:
            if answer.has_begun:
                raise
            refusal = refusal_of(error)
            refused, text = refusal.headers_and_body(scope["path"])
            if b"origin" in dict(scope["headers"]):  # as SGLang's middleware for browsers, which this one is around
                refused += [(b"access-control-allow-origin", b"*"), (b"access-control-allow-credentials", b"true")]
            await send({"type": "http.response.start", "status": int(refusal.status), "headers": refused})
            await send({"type": "http.response.body", "body": text})

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        """Refuses a body that waits to be asked for, and is too long. Raises HTTPException."""
        length = headers.get(b"content-length", b"")
        if headers.get(b"expect", b"").lower() == b"100-continue" and length.isdigit():
            self._check_size(int(length))

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self._config.max_body_bytes:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request body has {n_bytes} bytes, and this server takes at most {self._config.max_body_bytes}: send"
                " fewer prompts in one request, or start the server with a larger --max-body-mb",
            )

    async def _read(self, receive: Receive) -> bytes | None:
        """Reads the body; None if the client disconnected. A body over the limit is read too: a client reads no answer before."""
        parts, n_bytes, more = [], 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    n_bytes += len(part)
                    if n_bytes <= self._config.max_body_bytes:
                        parts.append(part)
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body was incomplete after {BODY_TIMEOUT_S:g} s: send it faster, or in several requests",
            ) from None
        self._check_size(n_bytes)
        return b"".join(parts)

    def _check_serves(self) -> None:
        """Raises HTTPException at shutdown."""
        if self._ending.reason is not None:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._ending.reason}: send the request again, to another server or later",
            )

    def _counted(self, caller: clients.Caller, send: Send) -> Send:
        """Counts a refusal, and adds `Retry-After` to it."""

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in REFUSAL_REASONS:
                reason = caller.refused_for or REFUSAL_REASONS[message["status"]]
                self._refused.labels(reason=reason).inc()
                self._n_refused[reason] += 1
                is_ending = self._ending.reason is not None
                retry_after_s = self._ending.retry_after_s if is_ending else caller.retry_after_s
                headers = [] if retry_after_s is None else [(b"retry-after", str(retry_after_s).encode())]
                if is_ending or message["status"] == HTTPStatus.REQUEST_TIMEOUT:
                    headers.append((b"connection", b"close"))
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        return counted_send


def _headers_of(headers: Iterable[tuple[bytes, bytes]], n_bytes: int | None) -> Iterator[tuple[bytes, bytes]]:
    """The request's headers as SGLang reads them. n_bytes: of a body that was decoded."""
    for name, value in headers:
        if name == b"content-type":  # SGLang compares what is before the first semicolon
            yield name, b";".join(part.strip() for part in value.split(b";"))
        elif n_bytes is None or name not in (b"content-length", b"content-encoding"):
            yield name, value
    if n_bytes is not None:
        yield b"content-length", str(n_bytes).encode()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receives the body in one message, then the client's disconnection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _Answer:
    """Sends the app's answer, errors in both formats. The head waits until the body begins: a stream may fail before."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._head: Message | None = None
        self._error = b""
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            if self._head["status"] >= HTTPStatus.BAD_REQUEST:
                self._error += message.get("body", b"")
                if message.get("more_body", False):
                    return
                self._head, message = _in_format_of(self._path, self._head, self._error)
            head, self._head, self.has_begun = self._head, None, True
            await self._send(head)
        await self._send(message)


def _in_format_of(path: str, head: Message, body: bytes) -> tuple[Message, Message]:
    if head["status"] == HTTPStatus.NOT_IMPLEMENTED:  # SGLang's status for an unsupported option, such as a stream
        head = {**head, "status": int(HTTPStatus.BAD_REQUEST)}
    is_json = dict(head["headers"]).get(b"content-type", b"").startswith(b"application/json")
    if not is_json and head["status"] == HTTPStatus.INTERNAL_SERVER_ERROR:
        refusal = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", INTERNAL_ERROR)
        headers, body = refusal.headers_and_body(path)
    else:
        body = as_the_path_has_it(path, head["status"], body) if is_json else body
        headers = [(name, value) for name, value in head["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
    return {**head, "headers": headers}, {"type": "http.response.body", "body": body}
