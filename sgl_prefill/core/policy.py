"""What a scheduling policy is: one object that decides who runs in the next step, and who is refused with what.

The live scheduler, the planner and batch jobs call the same object. A policy of one's own overrides `choose`:

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
from sgl_prefill.core.packing import StepSize, pack
from sgl_prefill.core.quotas import Quotas, Waiting

# A credit for waiting is given in tokens, whatever the cost model: at what a token of a cold prompt of this length costs.
TYPICAL_TOKENS = 1000


class Decision(NamedTuple):
    """What happens next."""

    run: list[Job]  # the jobs of the next step, the best first; they go on waiting until the caller takes them out
    refuse: dict[Job, Refusal]  # they wait no longer


class Writing(NamedTuple):
    """A job that runs on after its prefill, token by token. Its KV stays until it ends."""

    job: Job
    n_output_tokens: int  # so far


class ScoreParts(NamedTuple):
    """What the score of a waiting job is made of, in units of `PolicySettings.cost`: cost less credit, the smallest runs."""

    cost: float
    credit: float  # for its waiting


class PolicySettings(NamedTuple):
    """What a policy may need to know; costs are in units of `cost`."""

    step: StepSize = StepSize()
    cost: JctModel = cache_miss_tokens  # of a job, by its input and its cached tokens; pure
    fairness_lambda: float = 0.0  # credit of a waiting job, in units of `cost` a second
    max_queue_s: float | None = None  # no job waits longer while a later one is taken; None: no bound
    counts_sharers: bool = False
    predictor: Predictor | None = None  # of milliseconds; None where nobody knows them
    kv_tokens: int | None = None  # that the prefix cache can hold; None: no limit
    background_step_ms: float | None = None  # longest step of background jobs; None: as long as any
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
        """Makes the settings from what a user says.

        Args:
            jct_ms: the model of milliseconds; None: a job costs its cache-miss tokens.
            fairness_lambda: in tokens per second.
            unit_tokens: what `step` and all jobs count as one token (a simulation counts pages).
        """
        if jct_ms is None:
            return cls(step, cache_miss_tokens, fairness_lambda / unit_tokens, max_queue_s, counts_sharers)
        credit = fairness_lambda * jct_ms(TYPICAL_TOKENS, 0) / TYPICAL_TOKENS
        model = jct_ms.in_units_of(unit_tokens)
        return cls(step, model, credit, max_queue_s, counts_sharers, Predictor(model))


class Policy:
    """Keeps the waiting jobs, and their deadlines. A subclass says who runs next."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.waiting: dict[Job, None] = {}  # in the order in which they came here
        self.writing: Sequence[Writing] = ()  # those that run on, before each decision
        self._by_arrival: LazyHeap[Job] = LazyHeap()
        self._deadlines = Deadlines()
        self._counted = Waiting(settings.quotas)
        self._background_step = _background_step(settings)

    def choose(self, now_s: float) -> list[Job]:
        """Chooses the jobs of the next step, the best first; none only where none waits or some write."""
        raise NotImplementedError

    def fill_step(self, in_order: Iterable[Job]) -> list[Job]:
        """Takes the first of these, and those behind it that the step has room for.

        Background jobs share no step with others, which would wait for them, and run in short ones: who comes meanwhile waits
        for the end of a step. They come last in every order, by their rank.
        """
        jobs = iter(in_order)
        first = next(jobs, None)
        if first is None:
            return []
        alike = itertools.takewhile(lambda job: job.is_background == first.is_background, jobs)
        step = self._background_step if first.is_background else self.settings.step
        return pack(itertools.chain([first], alike), step)

    def refusal(self, job: Job) -> Refusal | None:
        """Says why a job may not begin to wait, which is to be asked before `add`; None where it may."""
        excess = self._counted.excess(job)
        return None if excess is None else excess.refusal(self.drain_ms(excess.client))

    def add(self, job: Job) -> None:
        """Takes in a job that begins to wait."""
        self.waiting[job] = None
        self._counted.add(job)
        if not job.is_background:  # nobody waits for those
            self._by_arrival.put(job, job.arrival_s)
        self._deadlines.add(job)

    def remove(self, job: Job) -> None:
        """Takes out a job that runs, or has left. It may have been refused before."""
        if job in self.waiting:
            del self.waiting[job]
            self._counted.discard(job)
        self._by_arrival.discard(job)
        self._deadlines.discard(job)

    def recalibrated(self, job: Job) -> None:
        """Hears that what the prefix cache holds of a job has changed, or how many share its prefix. It may have been
        refused before."""

    def prefix_computed(self, jobs: Sequence[Job]) -> None:
        """Hears that the page that all of these waited for is in the cache now; of each, `recalibrated` follows."""

    def started(self, jobs: Sequence[Job]) -> None:
        """Hears that these run now; `remove` of each follows."""

    def ended(self, job: Job, n_output_tokens: int) -> None:
        """Hears that a job which may write more than one token has written so many, and all."""

    @property
    def output_share(self) -> float | None:
        """Says what part of the tokens that they may write jobs will write; None where this policy leaves that to SGLang."""
        return None

    def forecast(self, job: Job) -> Forecast | None:
        """Predicts when a waiting job will be done, were nobody to arrive any more; None where this policy cannot say."""
        return None

    def parts_of_score(self, job: Job, now_s: float) -> ScoreParts | None:
        """Says why a waiting job stands where it does; None where this policy knows no scores."""
        return None

    def drain_ms(self, client: str | None = None) -> float | None:
        """Predicts when all that waits now will be done, or all of one client; None where this policy cannot say."""
        return None

    def decide(self, now_s: float) -> Decision:
        """Refuses what comes too late, and chooses among the others. Who is refused delays nobody else's forecast."""
        refuse = self._deadlines.take_expired(now_s)
        for job in refuse:
            self.remove(job)
        for job in self._deadlines.take_new():
            assert job.deadline_ms is not None
            if (forecast := self.forecast(job)) is not None:
                finish_ms = 1000 * (now_s - job.arrival_s) + forecast.ms
                if finish_ms > job.deadline_ms:
                    refuse[job] = Refusal.unreachable(job.deadline_ms, finish_ms, forecast.n_before)
                    self.remove(job)
        return Decision(self.choose(now_s), refuse)

    def oldest(self) -> Job | None:
        """Returns the job that has waited longest."""
        return self._by_arrival.first()


def _background_step(settings: PolicySettings) -> StepSize:
    """Returns how much of background jobs runs in one step."""
    step, predictor = settings.step, settings.predictor
    if settings.background_step_ms is None or predictor is None or step.is_one or predictor.model.miss_token_ms == 0:
        return step
    n_tokens = (settings.background_step_ms - predictor.model.step_ms) / predictor.model.miss_token_ms
    return step._replace(max_tokens=min(max(int(n_tokens), 1), step.max_tokens))


class Forecast(NamedTuple):
    """What lies before the end of a job."""

    ms: float  # from now on
    n_before: int  # jobs that run before it
