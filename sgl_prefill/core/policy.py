"""The interface of a scheduling policy: it decides which jobs run in the next step and which are refused.

The live scheduler, the planner and batch jobs call the same object. A new policy overrides `choose`:

    class NewestFirst(Policy):
        def choose(self, now_s):
            return self.fill_step(sorted(self.waiting, key=lambda job: -job.arrival_s))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgl_prefill.core.deadlines import Deadlines, Refusal
from sgl_prefill.core.jct import FittedJct, JctModel, Predictor, cache_miss_tokens
from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.packing import CountShared, StepSize, nothing_shared, pack
from sgl_prefill.core.quotas import Quotas, Waiting

# A credit for waiting is given in tokens, whatever the cost model: at what a token of a cold prompt of this length costs.
TYPICAL_TOKENS = 1000


class Decision(NamedTuple):
    """What happens next."""

    run: list[Job]  # jobs of the next step, best first; they stay in the queue until the caller removes them
    refuse: dict[Job, Refusal]  # already removed from the queue


class Writing(NamedTuple):
    """A job that decodes after its prefill. Its KV stays allocated until it ends."""

    job: Job
    n_output_tokens: int  # so far


class ScoreParts(NamedTuple):
    """The terms of a waiting job's score, in units of `PolicySettings.cost`: score = cost - credit; the smallest runs."""

    cost: float
    credit: float  # for its waiting


class PolicySettings(NamedTuple):
    """Parameters of every policy; costs are in units of `cost`."""

    step: StepSize = StepSize()
    cost: JctModel = cache_miss_tokens  # of a job, from its input and cached tokens; pure
    fairness_lambda: float = 0.0  # credit of a waiting job, in units of `cost` a second
    max_queue_s: float | None = None  # a job that has waited so long runs next; None: no bound
    counts_sharers: bool = False
    predictor: Predictor | None = None  # of step times in ms; None without a fitted model
    kv_tokens: int | None = None  # capacity of the prefix cache; None: unlimited
    background_step_ms: float | None = None  # longest step of background jobs; None: no own limit
    quotas: Quotas = Quotas()

    @classmethod
    def of(
        cls,
        step: StepSize,
        *,
        jct_ms: FittedJct | None,
        fairness_lambda: float,
        max_queue_s: float | None,
        counts_sharers: bool,
        unit_tokens: int = 1,
    ) -> PolicySettings:
        """Converts the user's options to settings.

        Args:
            jct_ms: fitted model of step times; None: a job costs its cache-miss tokens.
            fairness_lambda: in tokens per second.
            unit_tokens: tokens per unit in which `step` and all jobs count (a simulation counts pages).
        """
        if jct_ms is None:
            return cls(step, cache_miss_tokens, fairness_lambda / unit_tokens, max_queue_s, counts_sharers)
        credit = fairness_lambda * jct_ms(TYPICAL_TOKENS, 0) / TYPICAL_TOKENS
        model = jct_ms.in_units_of(unit_tokens)
        return cls(step, model, credit, max_queue_s, counts_sharers, Predictor(model))


class Policy:
    """Keeps the waiting jobs and their deadlines. A subclass chooses which jobs run next."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.waiting: dict[Job, None] = {}  # in order of arrival here
        self.count_shared: CountShared = nothing_shared  # the calibration sets it
        self.writing: Sequence[Writing] = ()  # decoding jobs; the caller sets it before each decision
        self._by_arrival: LazyHeap[Job] = LazyHeap()
        self._deadlines = Deadlines()
        self._counted = Waiting(settings.quotas)
        self._background_step = _background_step(settings)

    def choose(self, now_s: float) -> list[Job]:
        """Chooses the jobs of the next step, best first; may be empty only if no job waits or some are decoding."""
        raise NotImplementedError

    def fill_step(self, in_order: Iterable[Job]) -> list[Job]:
        """Takes the first of these jobs, and the next ones while the step has room.

        Background jobs get steps of their own, short ones, since a live request that arrives meanwhile waits for the end of the
        step. Their rank puts them last in every order.
        """
        jobs = iter(in_order)
        first = next(jobs, None)
        if first is None:
            return []
        alike = itertools.takewhile(lambda job: job.is_background == first.is_background, jobs)
        step = self._background_step if first.is_background else self.settings.step
        return pack(itertools.chain([first], alike), step, self.count_shared, self.settings.kv_tokens)

    def refusal(self, job: Job) -> Refusal | None:
        """Admission control: why a job may not enter the queue, or None. Call it before `add`."""
        excess = self._counted.excess(job)
        return None if excess is None else excess.refusal(self.drain_ms(excess.client))

    def add(self, job: Job) -> None:
        """Adds a job to the queue."""
        self.waiting[job] = None
        self._counted.add(job)
        if not job.is_background:  # `max_queue_s` is for live requests
            self._by_arrival.put(job, job.arrival_s)
        self._deadlines.add(job)

    def remove(self, job: Job) -> None:
        """Removes a job that starts, or was aborted. A job that was refused before is ignored."""
        if job in self.waiting:
            del self.waiting[job]
            self._counted.discard(job)
        self._by_arrival.discard(job)
        self._deadlines.discard(job)

    def recalibrated(self, job: Job) -> None:
        """Called after `n_cached_tokens` or `n_sharers` of a job changed. The job may have been refused before."""

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        """Called when the page that all of these waited for entered the cache; `recalibrated` follows for each."""

    def started(self, jobs: Sequence[Job]) -> None:
        """Called when these jobs start; `remove` follows for each."""

    def ended(self, job: Job, n_output_tokens: int) -> None:
        """Called when a decoding job has finished after `n_output_tokens`."""

    @property
    def output_share(self) -> float | None:
        """Expected output tokens as a share of `most_output_tokens`; None leaves the estimate to SGLang."""
        return None

    def forecast(self, job: Job) -> Forecast | None:
        """Predicts when a waiting job ends if no other job arrives; None if this policy cannot predict it."""
        return None

    def parts_of_score(self, job: Job, now_s: float) -> ScoreParts | None:
        """The score of a waiting job by its terms; None if this policy has no scores."""
        return None

    def drain_ms(self, client: str | None = None) -> float | None:
        """Predicts the milliseconds until the queue, or the queue of one client, is empty; None if it cannot be predicted."""
        return None

    def decide(self, now_s: float) -> Decision:
        """Refuses jobs that cannot meet their deadline, then chooses among the rest. Later forecasts leave refused jobs
        out."""
        new, refuse = dict.fromkeys(self._deadlines.take_new()), self._deadlines.take_expired(now_s)
        for job in [*refuse, *(one for one in new if one not in refuse)]:
            assert job.deadline_ms is not None
            forecast = self.forecast(job) if job in new else None
            waited_ms = 1000 * (now_s - job.arrival_s)
            # Of a job whose deadline has passed only the work counts: could it have been met at its arrival?
            past_ms = 0.0 if job in refuse else waited_ms
            if forecast is not None and past_ms + forecast.ms > job.deadline_ms:
                refuse[job] = Refusal.unreachable(job.deadline_ms, waited_ms + forecast.ms, forecast.n_before)
            if job in refuse:
                self.remove(job)
        return Decision(self.choose(now_s), refuse)

    def oldest(self) -> Job | None:
        """Returns the live job that has waited longest."""
        return self._by_arrival.first()


def _background_step(settings: PolicySettings) -> StepSize:
    """Size of a step of background jobs: as many tokens as `background_step_ms` allows."""
    step, predictor = settings.step, settings.predictor
    if settings.background_step_ms is None or predictor is None or step.is_one or predictor.model.miss_token_ms == 0:
        return step
    n_tokens = (settings.background_step_ms - predictor.model.step_ms) / predictor.model.miss_token_ms
    return step._replace(max_tokens=min(max(int(n_tokens), 1), step.max_tokens))


class Forecast(NamedTuple):
    """When a job is predicted to end."""

    ms: float  # from now
    n_before: int  # jobs that run before it
