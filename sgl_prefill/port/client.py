"""Who asks: by a header, by the body's `user` or by an API key, and from there in SGLang's `custom_params`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from sgl_prefill.port import custom_params

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.schedule_batch import Req

HEADER = "x-user-id"
PARAMETER = "sgl_prefill_client"
NOBODY = ""


def name(request: fastapi.Request | None, by: str) -> str:
    """Returns the client of a request, NOBODY where it names none. by: "user", "key" or "none"."""
    if request is None or by == "none":
        return NOBODY
    if by == "key":
        key = request.headers.get("authorization", NOBODY)
        return hashlib.sha256(key.encode()).hexdigest() if key else NOBODY
    return str(request.headers.get(HEADER) or getattr(request.state, PARAMETER, NOBODY))


def remember_user(request: fastapi.Request, user: str | None) -> None:
    """Keeps the `user` of a body, which SGLang's own request objects do not carry; the header comes first."""
    setattr(request.state, PARAMETER, user or NOBODY)


def mark(params: dict[str, Any], client: str) -> dict[str, Any]:
    """Returns sampling parameters that tell the scheduler; nobody names another by writing this parameter into a body."""
    if client:
        return custom_params.put(params, PARAMETER, client)
    given = params.get("custom_params") or {}
    if PARAMETER not in given:
        return params
    return {**params, "custom_params": {key: value for key, value in given.items() if key != PARAMETER}}


def of(req: Req) -> str:
    return custom_params.of(req, PARAMETER) or NOBODY
