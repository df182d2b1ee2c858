"""How a request says that it is of a background job: by an HTTP header or its body, and from there in SGLang's `custom_params`.

A header, since servers that know no background jobs pass over it; a field of the body, since gateways do so too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_prefill.port import custom_params

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

HEADER = "x-prefill-background"
FIELD = "prefill_background"
PARAMETER = "background"


def mark(params: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters that tell the scheduler."""
    return custom_params.put(params, PARAMETER, True)


def is_background(req: Req) -> bool:
    return custom_params.of(req, PARAMETER) is True
