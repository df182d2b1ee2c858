"""Replay of a trace on a simulated clock: the engine's own policy, KV plan and radix tree; a JCT model for the forward pass.

Tokens are counted in pages, so that a prompt of 14,000 tokens is a key of some hundred symbols: a prefix is shared in whole
pages, as in an engine with pages of that size.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from sgl_prefill import preflight
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import FittedJct, Work
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies import make
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.planner.routing import RoundRobin, Router
from sgl_prefill.planner.summary import Served as Served
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.port.simulated_cache import SimulatedCache
from sgl_prefill.scheduling.decisions import DecisionRecorder, RecordedPolicy


def name_of(config: PrefillConfig) -> str:
    """Names what of these options tells one replay from another."""
    words = [config.scheduling]
    words += [] if config.scheduling == "fifo" else [f"lambda {config.fairness_lambda:g}"]
    words += ["sharers counted"] if config.scheduling == "calibrated-srjf" and config.sharers == "count" else []
    words += ["cache-miss tokens"] if config.jct_model == "cache-miss" else []
    words += [] if config.max_queue_s is None else [f"at most {config.max_queue_s:g} s"]
    words += [] if config.pack_step_tokens == 0 else ["packed"]
    return ", ".join(words)


class SimulatedEngine:
    """One engine on a simulated clock: its policy, calibration and prefix cache.

    Whoever owns the clock tells it of each arrival (`add`), lets it choose a step while none runs (`run_step`), and says when
    the time of that step's end has come (`answered`).

    Args:
        config: the options of the engine.
        jct_ms: how long a forward pass takes.
        durable_tokens: KV slots of the prefix cache.
        is_fair: users get fair shares of it, as in an engine whose requests name them.
        settings: of the policy, in pages; None: what the options say.
        recorder: writes down what the policy hears and decides.
        job_of: makes the job of an arrival, its tokens pages; None: one of a prefix and a tail.
        actual_ms: says how long a step takes that the model says takes so long; None: as long.
    """

    def __init__(
        self,
        config: PrefillConfig,
        jct_ms: FittedJct,
        durable_tokens: int,
        *,
        page_tokens: int = 50,
        is_fair: bool = False,
        settings: PolicySettings | None = None,
        job_of: Callable[[Arrival], Job] | None = None,
        recorder: DecisionRecorder | None = None,
        actual_ms: Callable[[float], float] | None = None,
    ) -> None:
        self._jct_ms = jct_ms
        self._page_tokens = page_tokens
        self._actual_ms = actual_ms
        self._cache = SimulatedCache(durable_tokens // page_tokens)
        settings = settings_of(config, jct_ms, page_tokens) if settings is None else settings
        self._policy = make(config.scheduling, settings, is_fair=is_fair)
        self._predictor = settings.predictor
        self._recorder = recorder
        if recorder is not None:
            self._policy = RecordedPolicy(self._policy, recorder)
        self._calibration = Calibration(self._cache.tree, self._policy)
        self._cache.connect(self._calibration, self._calibration.advisor)
        self._job_of = Symbols(page_tokens).job_of if job_of is None else job_of
        self._arrived: list[Arrival] = []  # since the last step was chosen
        self._waiting: dict[Job, Arrival] = {}
        self._running: list[Arrival] = []
        self._n_unanswered_of: dict[str, int] = {}  # by user

    @property
    def is_computing(self) -> bool:
        return bool(self._running)

    @property
    def n_unanswered(self) -> int:
        """Returns how many requests wait or run."""
        return len(self._arrived) + len(self._waiting) + len(self._running)

    @property
    def n_users(self) -> int:
        """Returns of how many users requests wait or run."""
        return len(self._n_unanswered_of)

    def add(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)
        self._n_unanswered_of[arrival.of_user] = self._n_unanswered_of.get(arrival.of_user, 0) + 1

    def run_step(self, now_s: float) -> list[Served]:
        """Returns the requests of the step that begins now, all with one finish; none where the policy lets nobody run."""
        assert not self.is_computing
        for arrival in self._arrived:
            job = self._job_of(arrival)
            self._waiting[job] = arrival
            self._calibration.add(job)
        self._arrived.clear()
        run, refuse = self._policy.decide(now_s)
        for job in refuse:  # by a policy of one's own: arrivals of a trace have no deadline
            self._calibration.remove(job)
            self._forget(self._waiting.pop(job))
        if not run:
            return []
        plans = self._cache.begin(run)
        predicted = self._predict(run)
        self._policy.started(run)
        for job in run:
            self._calibration.remove(job)
        served = self._running = [self._waiting.pop(job) for job in run]
        cached = [
            min(plan.n_cached * self._page_tokens, arrival.n_tokens - 1)
            for plan, arrival in zip(plans, served, strict=True)
        ]
        work = self._jct_ms.of_step([(arrival.n_tokens, n) for arrival, n in zip(served, cached, strict=True)])
        took_ms = sum(work) if self._actual_ms is None else self._actual_ms(sum(work))
        finish_s = now_s + took_ms / 1000
        self._cache.end(run, plans)
        if predicted is not None and self._predictor is not None:
            self._predictor.observe(predicted, took_ms)
        if self._recorder is not None:
            found = {job.rid: plan.n_cached for job, plan in zip(run, plans, strict=True)}
            self._recorder.step_ended(took_ms, found)
        return [
            Served(arrival.arrival_s, now_s, finish_s, arrival.n_tokens, n)
            for arrival, n in zip(served, cached, strict=True)
        ]

    def _predict(self, run: Sequence[Job]) -> Work | None:
        """Says what a live engine predicts of a step, in the policy's own units; None where it knows no times."""
        if self._predictor is None:
            return None
        work = self._predictor.model.of_step([(job.n_input_tokens, job.n_cached_tokens) for job in run])
        if self._recorder is not None:
            self._recorder.predicted(self._predictor.ms(work))
        return work

    def answered(self) -> None:
        """Ends the step that runs."""
        for arrival in self._running:
            self._forget(arrival)
        self._running = []

    def _forget(self, arrival: Arrival) -> None:
        self._n_unanswered_of[arrival.of_user] -= 1
        if not self._n_unanswered_of[arrival.of_user]:
            del self._n_unanswered_of[arrival.of_user]


def replay(
    arrivals: Iterable[Arrival],
    config: PrefillConfig,
    jct_ms: FittedJct,
    durable_tokens: int,
    *,
    page_tokens: int = 50,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Served]:
    """Yields requests in the order in which one engine serves them.

    Args:
        arrivals: in time order.
        config: the options of the engine.
        jct_ms: how long a forward pass takes.
        durable_tokens: KV slots of the prefix cache.
    """
    engine = SimulatedEngine(config, jct_ms, durable_tokens, page_tokens=page_tokens)
    for _, served in replay_cluster(arrivals, [engine], RoundRobin(), on_progress=on_progress):
        yield served


def replay_cluster(
    arrivals: Iterable[Arrival],
    engines: Sequence[SimulatedEngine],
    router: Router,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Served]]:
    """Yields requests of several engines on one clock, with the engine of each, in the order in which their steps begin.

    At one moment first the steps that end are answered, then the router sends those that come, then engines that do not compute
    choose their next steps.

    Args:
        arrivals: in time order.
    """
    coming = iter(arrivals)
    next_one = next(coming, None)
    ends: list[tuple[float, int]] = []  # a heap of the steps that run: when, and which engine
    n_served = 0
    while next_one is not None or ends:
        now_s = min(next_one.arrival_s if next_one is not None else math.inf, ends[0][0] if ends else math.inf)
        told: dict[int, None] = {}  # engines of which something has changed, in the order in which it did
        while ends and ends[0][0] <= now_s:
            index = heapq.heappop(ends)[1]
            engines[index].answered()
            told[index] = None
        while next_one is not None and next_one.arrival_s <= now_s:
            index = router.engine_of(next_one, engines)
            engines[index].add(next_one)
            told[index] = None
            next_one = next(coming, None)
        for index in told:
            if engines[index].is_computing or not engines[index].n_unanswered:
                continue
            step = engines[index].run_step(now_s)
            if step:
                heapq.heappush(ends, (step[0].finish_s, index))
            for served in step:
                yield index, served
                n_served += 1
                if on_progress is not None and n_served % 1000 == 0:
                    on_progress(n_served)


def settings_of(config: PrefillConfig, jct_ms: FittedJct, page_tokens: int) -> PolicySettings:
    """Makes the settings of a policy whose jobs count pages."""
    max_requests = preflight.most_requests_of_step(config) or sys.maxsize
    pack_tokens = jct_ms.full_price_tokens() if config.pack_step_tokens is None else config.pack_step_tokens
    most = pack_tokens if pack_tokens is not None else max_requests * page_tokens  # a token costs nothing
    step = StepSize(max(most // page_tokens, 1), max_requests) if most else StepSize()
    return PolicySettings.of(
        step,
        jct_ms=jct_ms if config.jct_model == "fitted" else None,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=config.max_queue_s,
        counts_sharers=config.sharers == "count",
        unit_tokens=page_tokens,
    )


class Symbols:
    """Keys of a request: its prefix's pages, the same for all that share it, and pages of its own."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._numbers = itertools.count()
        self._prefixes: dict[str, array[int]] = {}
        self._n_jobs = 0

    def job_of(self, arrival: Arrival) -> Job:
        pages = self.of(arrival)
        self._n_jobs += 1
        most_cached_tokens = len(pages) - 1
        return Job(
            pages, arrival.arrival_s, most_cached_tokens, client=arrival.of_user, rid=f"simulated-{self._n_jobs}"
        )

    def of(self, arrival: Arrival) -> array[int]:
        n_prefix = arrival.prefix_tokens // self._page_tokens
        prefix = self._prefixes.setdefault(arrival.prefix_id, array("q"))
        while len(prefix) < n_prefix:  # the longest that this prefix id has had
            prefix.append(next(self._numbers))
        n_tail = max(-(-arrival.n_tokens // self._page_tokens) - n_prefix, 1)
        return prefix[:n_prefix] + array("q", itertools.islice(self._numbers, n_tail))
