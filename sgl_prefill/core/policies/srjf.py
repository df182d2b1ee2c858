"""Shortest remaining job first with continuous JCT calibration (PrefillOnly, section 6.3, Algorithm 1).

    score(r) = jct(n_input, n_cached) - fairness_lambda * T_queue;  the job with the smallest score runs next.

Line 11 of the printed algorithm stores `jct` where it must store `score`, else a job would be compared with the wrong
number; we keep the score. Calibration means that `n_cached` is what the cache holds at the moment of choice. All scores fall at
the same rate as time passes, so their order is that of `jct + fairness_lambda * arrival`: a key that changes only when what
the cache holds does (`calibration`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

from sgl_prefill.core.jct import JctModel
from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.ordered_sums import OrderedSums
from sgl_prefill.core.packing import LOOK_AT, fill_steps
from sgl_prefill.core.policy import Forecast, Policy, PolicySettings, ScoreParts


class CalibratedSrjf(Policy):
    """The order of the paper, with three things past it: sharers that count together, a bound on waiting, packed steps."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        # Weights: tokens that the job takes of a step, milliseconds of its tokens, 1 where it waits for another's prefix.
        self._by_score: OrderedSums[Job] = OrderedSums(n_weights=3)
        # Of the jobs that wait for one page, the first in the order computes it; forecasts assume that the others find it cached.
        self._by_page: dict[Hashable, LazyHeap[Job]] = {}
        self._page_of: dict[Job, Hashable] = {}
        self._first_of_page: dict[Hashable, Job] = {}
        # What has changed since the order was last looked at.
        self._moved: dict[Job, None] = {}
        self._changed_pages: dict[Hashable, None] = {}
        self._credit_from_s: dict[Job, float] = {}  # from when a job's waiting counts, where that is before its arrival

    def add(self, job: Job) -> None:
        super().add(job)
        self._moved[job] = None

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._moved.pop(job, None)
        self._leave_page(job)
        self._by_score.discard(job)
        self._credit_from_s.pop(job, None)

    def recalibrated(self, job: Job) -> None:
        if job in self.waiting:
            self._moved[job] = None

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        """Lets the waiting of these count from when the first of them came, where sharers count.

        Else the credit of an older job of another prefix breaks in between two of them, and both prefixes are computed again
        and again (past the paper; a larger lambda then costs little).
        """
        if self.settings.counts_sharers:
            since_s = min(self.since_s(job) for job in jobs)
            self._credit_from_s.update(dict.fromkeys(jobs, since_s))

    def choose(self, now_s: float) -> list[Job]:
        return self.fill_step(self.in_order(now_s))

    def in_order(self, now_s: float) -> Iterator[Job]:
        """Yields the job that is overdue, if there is one, and the others by their scores. Nothing may change meanwhile."""
        self._settle()
        overdue = self._overdue(now_s)
        if overdue is not None:
            yield overdue
        for job in self._by_score:
            if job is not overdue:
                yield job

    def _overdue(self, now_s: float) -> Job | None:
        oldest = self.oldest()
        if oldest is None or self.settings.max_queue_s is None:
            return None
        return oldest if now_s - oldest.arrival_s >= self.settings.max_queue_s else None

    def since_s(self, job: Job) -> float:
        """Returns from when on a job's waiting counts."""
        return min(self._credit_from_s.get(job, job.arrival_s), job.arrival_s)

    def cost(self, job: Job) -> float:
        """Returns what the score is made of, besides waiting."""
        return (
            cost_per_job(self.settings.cost, job)
            if self.settings.counts_sharers
            else cost_alone(self.settings.cost, job)
        )

    def score(self, job: Job, now_s: float) -> float:
        """Returns what jobs of one rank are compared by, up to what falls for all alike."""
        if job is self._overdue(now_s):
            return -math.inf
        return self._score(job)

    def _score(self, job: Job) -> float:
        return self.cost(job) + self.settings.fairness_lambda * self.since_s(job)

    def parts_of_score(self, job: Job, now_s: float) -> ScoreParts | None:
        return ScoreParts(self.cost(job), self.settings.fairness_lambda * (now_s - self.since_s(job)))

    def drain_ms(self, client: str | None = None) -> float | None:
        """Milliseconds until all jobs here are done, whatever the client; None without a predictor."""
        predictor = self.settings.predictor
        if predictor is None:
            return None
        self._settle()
        n_tokens, tokens_ms, _ = self._by_score.sums()
        steps = fill_steps(round(n_tokens), len(self._by_score), self.settings.step)
        return predictor.ms(predictor.model.work(steps.n_steps, len(self._by_score), tokens_ms))

    def _settle(self) -> None:
        """Brings the order up to date with all that has changed since it was last looked at: each job moves once."""
        keys = {job: (job.rank, self._score(job)) for job in self._moved}
        self._moved.clear()
        for job, key in keys.items():
            if self._page_of.get(job) != job.next_page:
                self._leave_page(job)
            if job.next_page is not None:
                self._page_of[job] = job.next_page
                self._by_page.setdefault(job.next_page, LazyHeap()).put(job, key)
                self._changed_pages[job.next_page] = None
        for page in self._changed_pages:
            waiting, before = self._by_page[page], self._first_of_page.pop(page, None)
            first = waiting.first()
            if first is None:
                del self._by_page[page]
                continue
            self._first_of_page[page] = first
            if first is not before:
                keys.setdefault(first, waiting.key_of(first))
                if before is not None and before in waiting:
                    keys.setdefault(before, waiting.key_of(before))
        self._changed_pages.clear()
        for job, key in keys.items():
            self._put(job, key, is_first=job.next_page is None or self._first_of_page[job.next_page] is job)

    def _leave_page(self, job: Job) -> None:
        page = self._page_of.pop(job, None)
        if page is not None:
            self._by_page[page].discard(job)
            self._changed_pages[page] = None

    def _put(self, job: Job, key: tuple[float, float], is_first: bool) -> None:
        n_cached = job.n_cached_tokens if is_first else max(job.n_cached_tokens, job.n_shared_tokens)
        n_step_tokens = self.settings.step.tokens_of(job.n_priced_tokens, n_cached)
        predictor = self.settings.predictor
        tokens_ms = 0.0 if predictor is None else predictor.model.tokens_ms(job.n_priced_tokens, n_cached)
        self._by_score.put(job, key, (n_step_tokens, tokens_ms, float(not is_first)))

    def forecast(self, job: Job) -> Forecast | None:
        """Costs some microseconds for each block of the order, and one look at each of those that would share the last step.

        A prefix that several wait for is counted once, with the first of them in the order; so is each step, with all who
        share it: later jobs fill the last.
        """
        predictor, size = self.settings.predictor, self.settings.step
        if predictor is None:
            return None
        self._settle()
        n_before, (n_tokens, tokens_ms, n_following) = self._by_score.before(job)
        own = self._by_score.weights_of(job)
        n_tokens, tokens_ms, n_following = n_tokens + own[0], tokens_ms + own[1], n_following + own[2]
        n_requests = n_before + 1
        steps = fill_steps(round(n_tokens), n_requests, size)
        follows = size.least_led_tokens > 0
        if n_following and steps.n_steps == 1 and not follows:
            steps = steps._replace(n_steps=2)  # a job shares no step with the job whose prefix it waits for
        room_tokens, room_requests = steps.room_tokens, steps.room_requests
        for other in itertools.islice(self._by_score.after(job), LOOK_AT):
            if not follows and other.next_page is not None and other.next_page == job.next_page:
                continue  # it finds that page cached in a later step
            n_here, ms_here, _ = self._by_score.weights_of(other)
            if room_requests == 0 or n_here > room_tokens:
                break
            room_tokens, room_requests = room_tokens - round(n_here), room_requests - 1
            n_requests, tokens_ms = n_requests + 1, tokens_ms + ms_here
        return Forecast(predictor.ms(predictor.model.work(steps.n_steps, n_requests, tokens_ms)), n_before)


class Srjf(CalibratedSrjf):
    """Plain shortest job first: what the prefix cache holds is not looked at."""

    def cost(self, job: Job) -> float:
        return self.settings.cost(job.n_priced_tokens, 0)

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        """Does nothing: what the prefix cache holds is not looked at."""


def cost_alone(jct: JctModel, job: Job) -> float:
    """Returns what a job would cost now."""
    return jct(job.n_priced_tokens, job.n_cached_tokens)


def cost_per_job(jct: JctModel, job: Job) -> float:
    """Returns what a job and, once it has run, its sharers cost together, over their number.

    Past the paper, which counts the first alone: of two new users with equal profiles, the one whose profile serves more
    waiting jobs goes first.
    """
    cost = cost_alone(jct, job)
    if job.n_sharers == 0:
        return cost
    sharer_cost = jct(job.n_priced_tokens, min(job.n_shared_tokens, job.most_cached_tokens))
    return (cost + job.n_sharers * sharer_cost) / (1 + job.n_sharers)
