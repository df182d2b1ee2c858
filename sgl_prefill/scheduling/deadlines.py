"""`deadline_ms` of a request: an answer that comes later is worth nothing.

A request that the JCT model says cannot be done in time is refused when it arrives (429), and one whose time has passed in
the queue is not computed any more (504). It travels in SGLang's `custom_params`, which reach the scheduler untouched.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.scheduling.arrival import arrival_s

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

PARAMETER = "deadline_ms"


class Refusal(NamedTuple):
    """Why a waiting request is not computed."""

    status: HTTPStatus
    message: str

    @classmethod
    def unreachable(cls, deadline_ms: float, finish_ms: float, n_before: int) -> Refusal:
        return cls(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"deadline_ms is {deadline_ms:g}, and this request is predicted to finish {finish_ms:.0f} ms after its arrival"
            f" ({n_before} requests come before it): send it to another server, or with a later deadline",
        )

    @classmethod
    def expired(cls, deadline_ms: float, waited_ms: float) -> Refusal:
        return cls(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"deadline_ms is {deadline_ms:g}, and after {waited_ms:.0f} ms in the queue this request has not begun:"
            " it was dropped",
        )


# SGLang's tokenizer manager makes errors of other statuses by itself.
STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)


class Deadlines:
    """The waiting requests that have a deadline, the earliest first."""

    def __init__(self) -> None:
        self._by_time: LazyHeap[Req] = LazyHeap()

    def add(self, req: Req) -> None:
        deadline_ms = deadline_ms_of(req)
        if deadline_ms is not None:
            self._by_time.put(req, arrival_s(req) + deadline_ms / 1000)

    def discard(self, req: Req) -> None:
        self._by_time.discard(req)

    def take_expired(self, now_s: float) -> list[Req]:
        """Those whose time has passed; they are forgotten."""
        expired = []
        while (req := self._by_time.first()) is not None and self._by_time.key_of(req) <= now_s:
            expired.append(req)
            self._by_time.discard(req)
        return expired


def custom_params(deadline_ms: float | None, given: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """`custom_params` of SGLang's sampling parameters that carry a deadline to the scheduler, besides those given."""
    return given if deadline_ms is None else {**(given or {}), PARAMETER: deadline_ms}


def deadline_ms_of(req: Req) -> float | None:
    """Counted from the request's arrival."""
    parameters: Any = req.sampling_params.custom_params
    return None if not parameters else parameters.get(PARAMETER)


def refuse(scheduler: Scheduler, req: Req, refusal: Refusal) -> None:
    """Answer a waiting request, as SGLang does where its queue is full. The caller takes it from the queue."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "status_code": refusal.status, "message": refusal.message}
    req.time_stats.trace_ctx.abort(abort_info=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=req.rid), req)
