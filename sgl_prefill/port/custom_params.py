"""What a request tells the scheduler beyond SGLang's own fields: in `custom_params` of its sampling parameters, which travel with
it. What is told there is in `deadlines`, `background`, `client` and `namespaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

OURS = "sgl_prefill_"  # names begin so of what the server alone says


def put(params: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns sampling parameters that tell this too."""
    return {**params, "custom_params": {**(params.get("custom_params") or {}), name: value}}


def put_ours(params: dict[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters that tell what the server says, which nobody else can by writing it into a body."""
    given = params.get("custom_params") or {}
    kept = {name: value for name, value in given.items() if not name.startswith(OURS)}
    if not told and len(kept) == len(given):
        return params
    return {**params, "custom_params": {**kept, **told}}


def of(req: Req, name: str) -> Any:
    """Returns what a request tells under this name, or None."""
    told: Any = req.sampling_params.custom_params
    return told.get(name) if told else None


def for_each(given: Any, tell: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns the sampling parameters of a request, one set or one a prompt, once `tell` has added to each."""
    if isinstance(given, list):
        return [tell(params) for params in given]
    return tell(given or {}) or given
