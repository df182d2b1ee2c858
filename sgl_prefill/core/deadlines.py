"""`deadline_ms` of a job: an answer that comes later is worth nothing.

A job that cannot be done in time is refused when it arrives (429), and one whose time has passed while it waited is not
computed (504).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap


class Refusal(NamedTuple):
    """Why a waiting job is not computed."""

    status: HTTPStatus
    message: str
    reason: str  # in a word, for metrics
    retry_after_s: int | None = None  # for the Retry-After header; None: no header

    @classmethod
    def unreachable(cls, deadline_ms: float, finish_ms: float, n_before: int) -> Refusal:
        return cls(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"deadline_ms is {deadline_ms:g}, and this request is predicted to finish {finish_ms:.0f} ms after its arrival"
            f" ({n_before} requests come before it): send it to another server, or with a later deadline",
            "deadline_unreachable",
        )

    @classmethod
    def expired(cls, deadline_ms: float, waited_ms: float) -> Refusal:
        return cls(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"deadline_ms is {deadline_ms:g}, and after {waited_ms:.0f} ms in the queue this request has not begun:"
            " it was dropped",
            "deadline_expired",
        )


class Deadlines:
    """The waiting jobs that have a deadline."""

    def __init__(self) -> None:
        self._by_time: LazyHeap[Job] = LazyHeap()
        self._new: dict[Job, None] = {}

    def add(self, job: Job) -> None:
        if job.deadline_ms is not None:
            self._by_time.put(job, job.arrival_s + job.deadline_ms / 1000)
            self._new[job] = None

    def discard(self, job: Job) -> None:
        self._by_time.discard(job)
        self._new.pop(job, None)

    def take_new(self) -> list[Job]:
        """Returns the jobs added since the last call."""
        new, self._new = list(self._new), {}
        return new

    def take_expired(self, now_s: float) -> dict[Job, Refusal]:
        """Removes and returns the jobs whose deadline has passed, earliest first."""
        expired = {}
        while (job := self._by_time.first()) is not None and self._by_time.key_of(job) <= now_s:
            assert job.deadline_ms is not None
            expired[job] = Refusal.expired(job.deadline_ms, 1000 * (now_s - job.arrival_s))
            self.discard(job)
        return expired
