"""Fair shares between clients, shortest job first within each (beyond the paper: its order serves one client's flood of short
requests before all other clients).

Clients whose service is at most their advance above the least served (`shares`) compete by the scores of their best jobs; a
client that has just arrived with a small job goes first. A job is charged at what it costs when it
runs, so that hits in the prefix cache are cheap. Priority classes come first, as in every policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence

from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import TYPICAL_TOKENS, Forecast, Policy, PolicySettings, ScoreParts
from sgl_prefill.core.shares import Shares


class Fair(Policy):
    """Fair queueing between clients; each client's jobs are ordered by a policy of its own.

    Args:
        order_of_client: makes the policy within one client.
    """

    def __init__(
        self, settings: PolicySettings, order_of_client: Callable[[PolicySettings], CalibratedSrjf] = CalibratedSrjf
    ) -> None:
        super().__init__(settings)
        self._order_of_client = order_of_client
        self._shared_cost = 0.0 if settings.step.is_one else settings.cost(0, 0)
        self._classes: dict[float, _PriorityClass] = {}

    def add(self, job: Job) -> None:
        super().add(job)
        if job.rank not in self._classes:
            self._classes[job.rank] = _PriorityClass(self.settings, self._order_of_client)
        self._classes[job.rank].add(job)

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._classes[job.rank].remove(job)

    def recalibrated(self, job: Job) -> None:
        if job in self.waiting:
            self._classes[job.rank].recalibrated(job)

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        by_client: dict[tuple[float, str], list[Job]] = {}
        for job in jobs:
            if job in self.waiting:
                by_client.setdefault((job.rank, job.client), []).append(job)
        for (rank, client), theirs in by_client.items():
            self._classes[rank].orders[client].prefix_computed(theirs)

    def started(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._classes[job.rank].shares.charge(job.client, self._price(job))

    def choose(self, now_s: float) -> list[Job]:
        rank = min((rank for rank, of_rank in self._classes.items() if of_rank.orders), default=None)
        if rank is None:
            return []
        if self.settings.max_queue_s is not None and (oldest := self.oldest()) is not None:
            self._classes[oldest.rank].look_again_at(oldest)  # it may have passed `max_queue_s`
        in_order = self._classes[rank].in_order(now_s, self._price)
        try:
            return self.fill_step(in_order)
        finally:
            in_order.close()

    def forecast(self, job: Job) -> Forecast | None:
        """Assumes that every other client is served as much as this one before the job ends, or its whole queue. Takes some
        microseconds for each waiting client."""
        return self._classes[job.rank].forecast(job)

    def parts_of_score(self, job: Job, now_s: float) -> ScoreParts | None:
        """The score within the job's client."""
        return self._classes[job.rank].orders[job.client].parts_of_score(job, now_s)

    def drain_ms(self, client: str | None = None) -> float | None:
        """Adds up all clients of all priorities. For one client: each other client is served as much
        meanwhile, or its whole queue."""
        if self.settings.predictor is None:
            return None
        backlogs_ms: dict[str, float] = {}
        for of_rank in self._classes.values():
            for one, order in of_rank.orders.items():
                backlogs_ms[one] = backlogs_ms.get(one, 0.0) + (order.drain_ms() or 0.0)
        most_ms = math.inf if client is None else backlogs_ms.get(client, 0.0)
        return sum(min(backlog_ms, most_ms) for backlog_ms in backlogs_ms.values())

    def _price(self, job: Job) -> float:
        """Marginal cost of a job in a step. The step's fixed cost is charged to no client."""
        return self.settings.cost(job.n_priced_tokens, job.n_reused_tokens) - self._shared_cost


class _PriorityClass:
    """The clients of one priority."""

    def __init__(self, settings: PolicySettings, order_of_client: Callable[[PolicySettings], CalibratedSrjf]) -> None:
        self._settings = settings
        self._order_of_client = order_of_client
        step_tokens = TYPICAL_TOKENS if settings.step.is_one else settings.step.max_tokens
        self.shares = Shares(settings.cost(step_tokens, 0))  # a full step, or a typical job where a step is one
        self.orders: dict[str, CalibratedSrjf] = {}  # of clients with waiting jobs
        # Clients that are not held back, by their best job: new clients first, then by score.
        self._by_best: LazyHeap[str] = LazyHeap()
        self._changed: dict[str, None] = {}  # clients whose best job may have changed

    def add(self, job: Job) -> None:
        if job.client not in self.orders:
            self.orders[job.client] = self._order_of_client(self._settings)
            self.shares.begin(job.client)
        self.orders[job.client].add(job)
        self._changed[job.client] = None

    def remove(self, job: Job) -> None:
        order = self.orders.get(job.client)
        if order is None or job not in order.waiting:
            return  # it was refused before
        order.remove(job)
        self._changed[job.client] = None
        if not order.waiting:
            del self.orders[job.client]
            self._by_best.discard(job.client)
            self.shares.end(job.client)

    def recalibrated(self, job: Job) -> None:
        self.orders[job.client].recalibrated(job)
        self._changed[job.client] = None

    def look_again_at(self, job: Job) -> None:
        self._changed[job.client] = None

    def in_order(self, now_s: float, price: Callable[[Job], float]) -> Generator[Job]:
        """Yields jobs as if each ran that was taken: the best of those whose clients are not too far ahead. Nothing may change
        meanwhile; to be closed."""
        shares = self.shares
        for changed in [*self._changed, *shares.let_go()]:
            self._offer(changed, now_s, price)
        self._changed.clear()
        before: dict[str, float] = {}
        behind: dict[str, Iterator[Job]] = {}  # each client's jobs behind its best
        best: dict[str, Job] = {}
        try:
            while (client := self._by_best.first()) is not None:
                if not shares.may_run(client):
                    self._by_best.discard(client)
                    shares.hold_back(client)
                    continue
                if client not in behind:
                    behind[client] = self.orders[client].in_order(now_s)
                    best[client] = next(behind[client])
                    before[client] = shares.served(client)
                    self._changed[client] = None
                yield best[client]
                shares.restore({client: shares.served(client) + price(best[client])})
                following = next(behind[client], None)
                if following is None:
                    self._by_best.discard(client)
                    shares.pass_over(client)
                else:
                    best[client] = following
                    self._by_best.put(client, (True, self.orders[client].score(following, now_s)))
                for other in shares.let_go():
                    self._offer(other, now_s, price)
        finally:
            shares.restore(before)

    def _offer(self, client: str, now_s: float, price: Callable[[Job], float]) -> None:
        """Lets a client compete by its best job."""
        order = self.orders.get(client)
        if order is not None:
            best = next(order.in_order(now_s))
            goes_first = self.shares.is_new(client) and price(best) <= self.shares.little
            self._by_best.put(client, (not goes_first, order.score(best, now_s)))

    def forecast(self, job: Job) -> Forecast | None:
        own = self.orders[job.client].forecast(job)
        if own is None:
            return None
        up_to = self.shares.served(job.client) + own.ms
        others_ms = sum(
            min(order.drain_ms() or 0.0, max(up_to + self.shares.advance(client) - self.shares.served(client), 0.0))
            for client, order in self.orders.items()
            if client != job.client
        )
        return own._replace(ms=own.ms + others_ms)
