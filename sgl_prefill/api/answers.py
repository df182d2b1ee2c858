"""The shapes of replies: choices with label scores, usage, and errors that every client can read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import orjson

from sgl_prefill.api.label_scoring import ScoredPrompt

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


def completion_choice(index: int, scored: ScoredPrompt, logprobs: int | None) -> dict[str, Any]:
    """Makes one choice of /v1/completions; `logprobs` as asked for, over the whole vocabulary."""
    shown = None
    if logprobs is not None:
        texts = [label.text for label in scored.labels]
        shown = {
            "tokens": [scored.best.text],
            "token_logprobs": [scored.distribution.logprobs[scored.distribution.best]],
            "top_logprobs": [dict(zip(texts, scored.distribution.logprobs, strict=True))],
            "text_offset": [0],
        }
    return {
        "index": index,
        "text": scored.best.text,
        "logprobs": shown,
        "finish_reason": "stop",
        "label_scores": scored.to_json(),
    }


def chat_choice(index: int, scored: ScoredPrompt, logprobs: bool, message_field: str) -> dict[str, Any]:
    """Makes one choice of /v1/chat/completions; `message_field` is "message", or "delta" in a stream."""
    entries = [
        {"token": label.text, "logprob": logprob, "bytes": list(label.text.encode())}
        for label, logprob in zip(scored.labels, scored.distribution.logprobs, strict=True)
    ]
    shown = {"content": [{**entries[scored.distribution.best], "top_logprobs": entries}]} if logprobs else None
    return {
        "index": index,
        message_field: {"role": "assistant", "content": scored.best.text},
        "logprobs": shown,
        "finish_reason": "stop",
        "label_scores": scored.to_json(),
    }


def usage(scored: list[ScoredPrompt]) -> dict[str, Any]:
    """Counts the tokens of all prompts together. Each answer is one token; cached tokens are part of the prompt tokens."""
    prompt_tokens = sum(one.meta_info["prompt_tokens"] for one in scored)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(scored),
        "total_tokens": prompt_tokens + len(scored),
        "prompt_tokens_details": {"cached_tokens": sum(one.meta_info["cached_tokens"] for one in scored)},
    }


# By the status of the answer, for /metrics.
REFUSAL_REASONS = {
    400: "invalid",
    413: "body_too_large",
    429: "deadline_unreachable",
    503: "overloaded",
    504: "deadline_expired",
}


class HttpShield:
    """ASGI middleware around all of SGLang's routes: a limit on bodies, OpenAI's error shape, and a count of refusals.

    SGLang answers errors flat (`message`, `type`, `code` at the top), OpenAI nested (`error.message`); clients of both
    exist, so a JSON error gets both. Bodies over the limit are answered with 413 before they are read whole.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        from prometheus_client import Counter  # SGLang has set PROMETHEUS_MULTIPROC_DIR by now

        self._app = app
        self._max_body_bytes = max_body_bytes
        self._refused = Counter("sglang:prefill_refused_requests", "Requests refused, by reason.", ["reason"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            # Health probes get 503 while a server starts.
            if (
                scope["method"] in ("POST", "PUT")
                and message["type"] == "http.response.start"
                and message["status"] in REFUSAL_REASONS
            ):
                self._refused.labels(reason=REFUSAL_REASONS[message["status"]]).inc()
            await send(message)

        sender = _NestedErrorSender(counting_send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._refuse(int(declared), receive, counting_send)
            return
        n_received = 0

        async def counted_receive() -> Message:
            nonlocal n_received
            message = await receive()
            n_received += len(message.get("body", b""))
            if n_received > self._max_body_bytes:
                raise _BodyTooLargeError
            return message

        async def send_unless_too_large(message: Message) -> None:
            # FastAPI answers any error in reading a body with 400 and a text of its own; ours comes instead.
            if n_received <= self._max_body_bytes:
                await sender(message)

        with contextlib.suppress(_BodyTooLargeError):
            await self._app(scope, counted_receive, send_unless_too_large)
        if n_received > self._max_body_bytes:
            await self._refuse(n_received, receive, counting_send)

    async def _refuse(self, n_bytes: int, receive: Receive, send: Send) -> None:
        # Read and drop what the client still sends: closing early would show it a broken pipe, not this answer.
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass
        text = (
            f"the request body has {n_bytes} bytes or more, and this server takes at most {self._max_body_bytes}:"
            " send fewer prompts in one request, or start the server with a larger --max-body-mb"
        )
        error = {"message": text, "type": "RequestTooLarge", "param": None, "code": 413}
        body = orjson.dumps({"object": "error", **error, "error": error})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _BodyTooLargeError(Exception):
    """Ends the reading of a body inside the wrapped app; never leaves this module."""


class _NestedErrorSender:
    """Wraps ASGI `send`: adds the nested `error` object to a flat JSON error, and passes everything else on."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] >= 400 and content_type.startswith(b"application/json"):
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = with_nested_error(self._body)
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        self._start = None
        await self._send({"type": "http.response.body", "body": body})


def with_nested_error(body: bytes) -> bytes:
    """Adds OpenAI's `error` object to an error of SGLang's."""
    try:
        flat = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(flat, dict) or "error" in flat or "message" not in flat:
        return body
    nested = {key: flat.get(key) for key in ("message", "type", "param", "code")}
    return orjson.dumps({**flat, "error": nested})
