"""Admission control: limits on what waits, in total and per client. A request beyond a limit gets a 429 with the time after which
to retry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from http import HTTPStatus
from typing import NamedTuple

from sgl_prefill.core.deadlines import Refusal
from sgl_prefill.core.job import Job


class Limit(NamedTuple):
    """The most that may wait at a time; None: no limit."""

    requests: int | None = None
    tokens: int | None = None  # of inputs, cached or not

    @classmethod
    def parse(cls, text: str) -> Limit | None:
        """Reads `200` (requests) or `100000t` (tokens). Returns None for anything else, and for 0."""
        number = text.removesuffix("t")
        if not (number.isascii() and number.isdigit() and int(number)):
            return None
        return cls(tokens=int(number)) if text.endswith("t") else cls(requests=int(number))


class Quotas(NamedTuple):
    """The limits of a server."""

    of_all: Limit = Limit()
    of_client: Limit = Limit()  # each


class Excess(NamedTuple):
    """Why a job may not begin to wait."""

    client: str | None  # whose limit is exceeded; None: the limit on all clients together
    unit: str  # "requests" or "tokens"
    n_waiting: int  # of that unit
    n_more: int  # that the job would add
    limit: int

    @property
    def share_to_go(self) -> float:
        """Share of the waiting work that must be done before there is room."""
        return min((self.n_waiting + self.n_more - self.limit) / self.n_waiting, 1.0)

    def refusal(self, drain_ms: float | None) -> Refusal:
        """drain_ms: predicted time until all that counts against this limit is done; None if unknown."""
        retry_after_s = 1 if drain_ms is None else max(math.ceil(drain_ms * self.share_to_go / 1000), 1)
        flag = f"--max-{'' if self.client is None else 'client-'}waiting"
        limit = f"{self.limit}{'t' if self.unit == 'tokens' else ''}"
        who = "" if self.client is None else "of this client "
        more = "" if self.unit == "requests" else f", this request has {self.n_more},"
        return Refusal(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{self.n_waiting} {self.unit} {who}wait{more} and {flag} is {limit}: send it again in {retry_after_s} s, or to"
            " another server",
            "queue_full" if self.client is None else "client_queue_full",
            retry_after_s,
        )


class Count(NamedTuple):
    """Amount of waiting work."""

    requests: int = 0
    tokens: int = 0

    def plus(self, n_requests: int, n_tokens: int) -> Count:
        return Count(self.requests + n_requests, self.tokens + n_tokens)


class Waiting:
    """Counts what waits, in total and per client; each method takes O(1)."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._of_all = Count()
        self._of_client: dict[str, Count] = {}

    def add(self, job: Job) -> None:
        self._count(job, 1, job.n_input_tokens)

    def discard(self, job: Job) -> None:
        self._count(job, -1, -job.n_input_tokens)

    def excess(self, job: Job) -> Excess | None:
        """The limit that a new job would exceed, or None. A job is always admitted to an empty queue, so that no request is
        refused for ever."""
        return next(self._excesses(job), None)

    def _excesses(self, job: Job) -> Iterator[Excess]:
        of_client = self._of_client.get(job.client, Count())
        more = Count(1, job.n_input_tokens)
        for client, counted, limits in (
            (job.client, of_client, self._quotas.of_client),
            (None, self._of_all, self._quotas.of_all),
        ):
            for unit, n_waiting, n_more, limit in zip(Limit._fields, counted, more, limits, strict=True):
                if limit is not None and n_waiting and n_waiting + n_more > limit:
                    yield Excess(client, unit, n_waiting, n_more, limit)

    def _count(self, job: Job, n_requests: int, n_tokens: int) -> None:
        self._of_all = self._of_all.plus(n_requests, n_tokens)
        of_client = self._of_client.pop(job.client, Count()).plus(n_requests, n_tokens)
        if of_client.requests:
            self._of_client[job.client] = of_client
