"""How a request says that it is of a background job: by an HTTP header, and from there in SGLang's `custom_params`.

A header, since bodies of all routes have fields of their own, and servers that know no background jobs pass over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_prefill.port import custom_params

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.schedule_batch import Req

HEADER = "x-prefill-background"
PARAMETER = "background"


def is_asked_for(request: fastapi.Request | None) -> bool:
    """Says whether a request came with the header."""
    return request is not None and request.headers.get(HEADER) == "1"


def mark(params: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters that tell the scheduler."""
    return custom_params.put(params, PARAMETER, True)


def is_background(req: Req) -> bool:
    return custom_params.of(req, PARAMETER) is True
