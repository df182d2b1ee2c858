"""Shortest remaining job first with continuous JCT calibration (PrefillOnly, section 6.3, Algorithm 1).

    score(r) = jct(n_input, n_cached) - fairness_lambda * T_queue;  the request with the smallest score runs next.

Line 11 of the printed algorithm stores `jct` where it must store `score`, else a request would be compared with the
wrong number; we keep the score. Calibration means that `n_cached` is what the cache holds at the moment of choice. All scores
fall at the same rate as time passes, so their order is that of `jct + fairness_lambda * arrival`: a key that changes only
when `n_cached` does, which the caller reports (`calibrate`; see `match_index`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from sgl_prefill.core.jct import JctModel
from sgl_prefill.core.lazy_heap import LazyHeap

Request = TypeVar("Request", bound=Hashable)


class Waiting(NamedTuple):
    """What the policy must know of one waiting request."""

    n_input_tokens: int
    n_cached_tokens: int  # longest prefix that the cache holds now, as far as the request may use it
    arrival_s: float  # on one clock for all requests
    rank: float = 0.0  # user-given priority class: a smaller rank always goes first; 0 where priorities are off
    credit_from_s: float = math.inf  # from when its waiting counts, where that is before its arrival
    n_sharers: int = 0  # others that wait for a prefix which this request would compute
    n_shared_tokens: int = 0  # how long that prefix is

    @property
    def since_s(self) -> float:
        """From when on its waiting counts."""
        return min(self.arrival_s, self.credit_from_s)


def cost_per_request(jct: JctModel, waiting: Waiting) -> float:
    """What a request costs, and what its sharers cost once it has run, a request (past the paper, which counts the first
    alone): of two new users with equal profiles, the one whose profile serves more waiting requests goes first.
    """
    cost = jct(waiting.n_input_tokens, waiting.n_cached_tokens)
    if waiting.n_sharers == 0:
        return cost
    sharer_cost = jct(waiting.n_input_tokens, waiting.n_shared_tokens)
    return (cost + waiting.n_sharers * sharer_cost) / (1 + waiting.n_sharers)


class SrjfQueue(Generic[Request]):
    """Waiting requests in the order of the policy.

    Args:
        jct: predicted cost of a request; pure.
        fairness_lambda: in units of `jct` per second of waiting (tokens/s for the token proxy).
        max_queue_s: no request waits longer than that while a later one is taken; None: no bound.
    """

    def __init__(self, jct: JctModel, fairness_lambda: float, max_queue_s: float | None = None) -> None:
        self._jct, self._fairness_lambda, self._max_queue_s = jct, fairness_lambda, max_queue_s
        self._waiting: dict[Request, Waiting] = {}
        self._by_score: LazyHeap[Request] = LazyHeap()
        self._by_arrival: LazyHeap[Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def put(self, request: Request, waiting: Waiting) -> None:
        """Add a request. Ties go to the one that was added first."""
        self._waiting[request] = waiting
        score = cost_per_request(self._jct, waiting) + self._fairness_lambda * waiting.since_s
        self._by_score.put(request, (waiting.rank, score))
        self._by_arrival.put(request, waiting.arrival_s)

    def calibrate(self, request: Request, n_cached_tokens: int, n_sharers: int = 0, n_shared_tokens: int = 0) -> None:
        """The cache now holds so many tokens of a waiting request, and so many others wait for it to compute more."""
        known = self._waiting[request]
        found = known._replace(n_cached_tokens=n_cached_tokens, n_sharers=n_sharers, n_shared_tokens=n_shared_tokens)
        if found != known:
            self.put(request, found)

    def credit_together(self, requests: Collection[Request]) -> None:
        """The prefix that these waited for has been computed: their waiting counts from when the first of them came.

        Else the credit of an older request of another prefix breaks in between two of them, and both prefixes are computed
        again and again (past the paper; a larger lambda then costs little).
        """
        since_s = min((self._waiting[one].since_s for one in requests), default=math.inf)
        for request in requests:
            self.put(request, self._waiting[request]._replace(credit_from_s=since_s))

    def remove(self, request: Request) -> None:
        """A request runs, or has left."""
        del self._waiting[request]
        self._by_score.discard(request)
        self._by_arrival.discard(request)

    def waiting(self, request: Request) -> Waiting:
        return self._waiting[request]

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return self._by_arrival.first()

    def first(self, now_s: float) -> Request | None:
        """The request to run next, which stays, or None where none waits: the one that is overdue, else the best score."""
        oldest = self.oldest()
        if oldest is not None and self._max_queue_s is not None:
            waited_s = now_s - self._waiting[oldest].arrival_s
            if waited_s >= self._max_queue_s:
                return oldest
        return self._by_score.first()

    def before(self, request: Request) -> list[Request]:
        """Waiting requests with better scores, in no order. Costs O(waiting requests)."""
        return self._by_score.before(request)

    def starvation_s(self, taken: Collection[Request], now_s: float) -> float:
        """How long the oldest request has waited when later ones are taken; 0 where none is passed over."""
        oldest = self.oldest()
        if oldest is None or oldest in taken:
            return 0.0
        oldest_arrival_s = self._waiting[oldest].arrival_s
        if oldest_arrival_s >= max(self._waiting[one].arrival_s for one in taken):
            return 0.0
        return max(now_s - oldest_arrival_s, 0.0)

    def in_order(self, now_s: float) -> Iterator[Request]:
        """`first`, then the others by their scores, without removing them. For steps of several requests."""
        first = self.first(now_s)
        if first is not None:
            yield first
        for request in self._by_score.in_order():
            if request is not first:
                yield request
