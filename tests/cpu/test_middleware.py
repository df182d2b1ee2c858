"""The middleware around a toy app."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import prometheus_client
import pytest
import zstandard

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import middleware
from sgl_prefill.http.middleware import Middleware
from sgl_prefill.http.shutdown import SHUTTING_DOWN, Ending

Message = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)
        nested: dict[str, Any] = found["error"]
        return nested


@pytest.fixture(autouse=True)
def _no_global_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prometheus_client, "Counter", lambda *_: type("Counter", (), {"labels": lambda *_, **__: Nothing})
    )


class Nothing:
    @staticmethod
    def inc() -> None:
        pass


def ask(
    app: App,
    bodies: Sequence[bytes] = (b"{}",),
    *,
    ending: Ending | None = None,
    stays_open: bool = False,
    headers: Sequence[tuple[bytes, bytes]] = (),
    **options: Any,
) -> Answer:
    """Sends one POST in parts; stays_open: the last part never comes."""
    parts: list[Message] = [
        {"type": "http.request", "body": part, "more_body": stays_open or index + 1 < len(bodies)}
        for index, part in enumerate(bodies)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    outermost = Middleware(app, PrefillConfig(**options), ending or Ending(7))
    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    asyncio.run(outermost(scope, receive, send))
    start, *rest = sent
    assert [message["type"] for message in rest] == ["http.response.body"] * len(rest)
    shown = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], shown, b"".join(message.get("body", b"") for message in rest))


async def begin(send: Any, status: int = 200, kind: bytes = b"application/json") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def reading_app(scope: Any, receive: Any, send: Any) -> None:
    n_bytes, more = 0, True
    while more:
        message = await receive()
        n_bytes, more = n_bytes + len(message["body"]), message["more_body"]
    await begin(send)
    await send({"type": "http.response.body", "body": str(n_bytes).encode()})


def failing(error: Exception, after: int = 0) -> App:
    """An app whose stream fails after so many parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send, kind=b"text/event-stream")
        for _ in range(after):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise error

    return app


def test_a_body_within_the_limits_passes() -> None:
    assert ask(reading_app, [b"ab", b"cde"]) == (200, {"content-type": "application/json"}, b"5")


def test_a_stream_that_fails_before_its_first_byte_gets_a_status() -> None:
    """Its client had got 200, and then nothing."""
    answer = ask(failing(BadRequestError("max_tokens is 3")))
    assert (answer.status, answer.error["message"]) == (400, "max_tokens is 3")
    wrapped = RuntimeError("response already started")
    wrapped.__cause__ = BadRequestError("max_tokens is 4")
    assert ask(failing(wrapped)).error["message"] == "max_tokens is 4"
    broken = ask(failing(KeyError("secret")))
    assert broken.status == 500
    assert b"secret" not in broken.body


def test_a_stream_that_fails_later_is_cut() -> None:
    with pytest.raises(KeyError):
        ask(failing(KeyError("k"), after=1))


def test_an_error_without_a_shape_gets_one() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin(send, 500, b"text/plain")
        await send({"type": "http.response.body", "body": b"Internal Server Error"})

    answer = ask(app)
    assert answer.status == 500
    assert answer.error["code"] == 500
    assert answer.headers["content-length"] == str(len(answer.body))


def test_a_body_that_does_not_come_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.05)
    answer = ask(reading_app, [b"ab"], stays_open=True)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "incomplete after 0.05 s" in answer.error["message"]


def test_a_body_over_the_limit_gets_413() -> None:
    answer = ask(reading_app, [b"x" * 100] * 3, max_body_mb=150 / (1 << 20))
    assert answer.status == 413
    assert "300 bytes, and this server takes at most 150" in answer.error["message"]


def test_a_server_that_ends_takes_no_more() -> None:
    ending = Ending(7.5)
    ending.reason = SHUTTING_DOWN
    answer = ask(reading_app, ending=ending)
    assert (answer.status, answer.headers["retry-after"]) == (503, "8")
    assert SHUTTING_DOWN in answer.error["message"]
    assert ending.n_in_flight == 0


def test_a_key_that_is_no_ascii_is_a_wrong_key() -> None:
    assert ask(reading_app, headers=[(b"authorization", "Bearer \u00e9".encode())]).status == 401


async def body_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the headers that it sees, and the body."""
    body = (await receive())["body"]
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await begin(send)
    await send({"type": "http.response.body", "body": json.dumps([headers, body.decode()]).encode()})


TEXT = b'{"prompt": "' + b"a" * 3000 + b'"}'
RAW_DEFLATE = zlib.compressobj(wbits=-15)
ENCODED = {
    "gzip": gzip.compress(TEXT),
    "GZIP ": gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]),  # of two members
    "deflate": zlib.compress(TEXT),
    "deflate, identity": RAW_DEFLATE.compress(TEXT) + RAW_DEFLATE.flush(),
    "zstd": zstandard.compress(TEXT),
    "gzip, zstd": zstandard.compress(gzip.compress(TEXT)),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_an_encoded_body_is_decoded(encoding: str) -> None:
    body = ENCODED[encoding]
    headers = [(b"content-encoding", encoding.encode()), (b"content-length", str(len(body)).encode())]
    answer = ask(body_app, [body[:20], body[20:]], headers=headers)
    assert json.loads(answer.body) == [{"content-length": str(len(TEXT))}, TEXT.decode()]


@pytest.mark.parametrize("encoding", ENCODED)
def test_the_limit_is_for_what_comes_out_of_a_body(encoding: str) -> None:
    answer = ask(body_app, [ENCODED[encoding]], headers=[(b"content-encoding", encoding.encode())], max_body_mb=0.002)
    assert (answer.status, "--max-body-mb" in answer.error["message"]) == (413, True)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "told"),
    [
        (b"br", b"x", 415, "Content-Encoding is 'br', and this server reads gzip"),
        (b"gzip", b"{}", 400, "Content-Encoding is gzip, and the body is not"),
        (b"gzip", gzip.compress(TEXT, mtime=0)[:40], 400, "it ends too early"),
        (b"zstd", b"{}", 400, "Content-Encoding is zstd, and the body is not"),
    ],
)
def test_a_body_that_cannot_be_decoded_says_so(encoding: bytes, body: bytes, status: int, told: str) -> None:
    answer = ask(body_app, [body], headers=[(b"content-encoding", encoding)])
    assert answer.status == status
    assert told in answer.error["message"]


def test_blanks_around_the_media_type_are_no_part_of_it() -> None:
    answer = ask(body_app, headers=[(b"content-type", b"application/json ; charset=utf-8")])
    assert json.loads(answer.body)[0]["content-type"] == "application/json;charset=utf-8"


def test_a_body_that_is_too_long_is_not_asked_for() -> None:
    headers = [(b"expect", b"100-continue"), (b"content-length", b"3000000")]
    assert ask(reading_app, [], headers=headers, max_body_mb=1).status == 413


def test_a_page_of_another_origin_reads_why_it_is_refused() -> None:
    answer = ask(reading_app, [b"a" * 3000], headers=[(b"origin", b"http://one")], max_body_mb=0.001)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in ask(reading_app, [b"a" * 3000], max_body_mb=0.001).headers
