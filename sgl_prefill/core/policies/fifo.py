"""First in, first out."""

from __future__ import annotations

from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.policy import Policy, PolicySettings


class Fifo(Policy):
    """Who came first runs first, within its priority class; the prefix cache is not looked at."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._in_order: LazyHeap[Job] = LazyHeap()

    def add(self, job: Job) -> None:
        super().add(job)
        self._in_order.put(job, (job.rank, job.arrival_s))

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._in_order.discard(job)

    def choose(self, now_s: float) -> list[Job]:
        return self.fill_step(self._in_order.in_order())
