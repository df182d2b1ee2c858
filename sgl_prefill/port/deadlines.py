"""How `deadline_ms` of a request reaches the scheduler, in SGLang's `custom_params`, and how a refusal reaches the client."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.deadlines import Refusal
from sgl_prefill.port.custom_params import of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

PARAMETER = "deadline_ms"
# SGLang's tokenizer manager makes errors of other statuses by itself.
STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)


def custom_params(deadline_ms: float | None, given: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Returns the `custom_params` of SGLang's sampling parameters that carry a deadline to the scheduler, besides those given."""
    return given if deadline_ms is None else {**(given or {}), PARAMETER: deadline_ms}


def deadline_ms_of(req: Req) -> float | None:
    """Returns a request's deadline, counted from its arrival."""
    found: float | None = of(req, PARAMETER)
    return found


def refuse(scheduler: Scheduler, req: Req, refusal: Refusal) -> None:
    """Answer a request, as SGLang does where its queue is full. The caller takes it from the queue."""
    from sglang.srt.managers.io_struct import AbortReq

    told = {"reason": refusal.reason, "retry_after_s": refusal.retry_after_s}
    reason = {"type": "abort", "status_code": refusal.status, "message": refusal.message, **told}
    req.time_stats.trace_ctx.abort(abort_info=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=req.rid), req)
