"""The format of errors. SGLang's are flat (`message`, `type`, `code` at the top), OpenAI's are nested (`error.message`). Clients
of both exist, so a JSON error contains both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from fastapi import HTTPException

logger = logging.getLogger(__name__)

MESSAGE_FIELDS = ("message", "detail", "error_message", "error")  # in errors of SGLang and FastAPI
INTERNAL_ERROR = "the server failed at this request; its log contains the error"


class Refusal(NamedTuple):
    """An error as the body of an answer."""

    status: HTTPStatus
    kind: str
    message: str

    @property
    def flat(self) -> dict[str, Any]:
        """The error in SGLang's format."""
        shown = {"message": self.message, "type": self.kind, "param": None, "code": int(self.status)}
        return {"object": "error", **shown}

    def headers_and_body(self, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        body = as_the_path_has_it(path, self.status, orjson.dumps(self.flat))
        return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], body


def refusal_of(error: BaseException) -> Refusal:
    """Returns the answer to a request that failed before anything was sent. By SGLang's convention a ValueError is the
    client's fault."""
    error = _unwrapped(error)
    if isinstance(error, HTTPException):
        return Refusal(HTTPStatus(error.status_code), HTTPStatus(error.status_code).phrase, str(error.detail))
    if isinstance(error, ValueError):
        return Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error))
    logger.exception("a request failed", exc_info=error)
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", INTERNAL_ERROR)


def _unwrapped(error: BaseException) -> BaseException:
    """Removes Starlette's wrappers: exception groups of one, and a RuntimeError where the head was prepared already."""
    while True:
        inner: Sequence[BaseException] = getattr(error, "exceptions", ())
        if len(inner) == 1:
            error = inner[0]
        elif type(error) is RuntimeError and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


SYSTEM_ONE = "/v1/systemone"  # whose errors have a format of their own
KINDS = {401: "authentication_error", 403: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def as_the_path_has_it(path: str, status: int, body: bytes) -> bytes:
    """A JSON error in the formats of the clients of a route."""
    body = with_nested_error(body)
    if not path.endswith(SYSTEM_ONE):
        return body
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(found, dict) or "message" not in found:
        return body  # a list of validation errors
    kind = KINDS.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return orjson.dumps({"detail": {"error_type": kind, "message": found["message"]}})


def with_nested_error(body: bytes) -> bytes:
    """Adds OpenAI's `error` object to a JSON error of SGLang or FastAPI."""
    try:
        flat = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(flat, dict) or isinstance(flat.get("error"), dict):
        return body
    message = next((text for name in MESSAGE_FIELDS if isinstance(text := flat.get(name), str)), None)
    if message is None:
        return body
    flat.setdefault("message", message)
    if str(kind := flat.get("type")).isdigit():  # SGLang's kind of some errors is their status
        flat["type"] = HTTPStatus(int(str(kind))).phrase
    nested = {key: flat.get(key) for key in ("message", "type", "param", "code")}
    return orjson.dumps({**flat, "error": nested})
