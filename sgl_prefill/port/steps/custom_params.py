"""Parameters of a request beyond SGLang's own, in `custom_params` of its sampling parameters: deadline, background job, and
under names that only the server may write client, namespace and answer tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

OURS = "sgl_prefill_"  # prefix of the names that only the server may write
DEADLINE = "deadline_ms"  # counted from the arrival
REFUSAL_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)  # unknown to SGLang's tokenizer manager
BACKGROUND = "background"
# Servers without background jobs ignore a header; gateways pass fields of the body.
BACKGROUND_HEADER = "x-prefill-background"
BACKGROUND_FIELD = "prefill_background"


def put(params: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns a copy of sampling parameters with one more custom parameter."""
    return {**params, "custom_params": {**(params.get("custom_params") or {}), name: value}}


def put_ours(params: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters with the server's parameters `ours`, without a client's parameters under such names."""
    given = params.get("custom_params") or {}
    kept = {name: value for name, value in given.items() if not name.startswith(OURS)}
    if not ours and len(kept) == len(given):
        return params
    return {**params, "custom_params": {**kept, **ours}}


def for_each(given: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Applies `change` to the sampling parameters of a request: one set, or one per prompt."""
    if isinstance(given, list):
        return [change(params) for params in given]
    return change(given or {}) or given


def with_deadline(deadline_ms: float | None, given: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Returns `custom_params` with a deadline besides those given."""
    return given if deadline_ms is None else {**(given or {}), DEADLINE: deadline_ms}


def mark_background(params: dict[str, Any]) -> dict[str, Any]:
    return put(params, BACKGROUND, True)


def of(req: Req, name: str) -> Any:
    """Returns a custom parameter of a request in the scheduler, or None."""
    params: Any = req.sampling_params.custom_params
    return params.get(name) if params else None


def is_background(req: Req) -> bool:
    return of(req, BACKGROUND) is True
