"""The lines of answers, in the shape of OpenAI's batch files."""

from __future__ import annotations

import uuid
from typing import Any

import orjson


def answered(custom_id: str, status: int, body: bytes) -> bytes:
    """Makes the line of a row that has an answer. body: JSON, which is not parsed again."""
    return (
        b'{"id":"batch_req_%s","custom_id":%s,"response":{"status_code":%d,"request_id":"%s","body":%s},"error":null}'
        % (
            uuid.uuid4().hex.encode(),
            orjson.dumps(custom_id),
            status,
            uuid.uuid4().hex.encode(),
            body,
        )
    )


def refused(custom_id: str | None, line_number: int, message: str, *, status: int | None = None) -> bytes:
    """Makes the line of a row without an answer. status: the server's; None: it was not asked."""
    response = None if status is None else {"status_code": status, "request_id": uuid.uuid4().hex, "body": None}
    code = "invalid_request" if status is None or status < 500 else "server_error"
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "line": line_number,
            "response": response,
            "error": {"code": code, "message": message},
        }
    )


def custom_id_of(line: bytes) -> str:
    """Returns which row a line answers."""
    fields: dict[str, Any] = orjson.loads(line)
    custom_id: str = fields["custom_id"]
    return custom_id


def message_of(body: bytes) -> str:
    """Returns what an error says."""
    try:
        fields = orjson.loads(body)
        return str(fields["message"] if "message" in fields else fields["error"]["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return body[:200].decode(errors="replace")
