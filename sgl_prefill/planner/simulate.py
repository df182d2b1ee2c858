"""Replay of a trace on a simulated clock: the engine's own policy, KV plan and radix tree; a JCT model for the forward pass.

Tokens are counted in pages, so that a prompt of 14,000 tokens is a key of some hundred symbols: a prefix is shared in whole
pages, as in an engine with pages of that size.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import LEAST_LED_TOKENS, StepSize
from sgl_prefill.core.policies import make
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.planner.summary import Served as Served
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.port.kv.simulated_cache import SimulatedCache
from sgl_prefill.startup import arguments
from sgl_prefill.startup.techniques import EVICT


def name_of(config: PrefillConfig) -> str:
    """Names the options that differ between replays."""
    words = [config.scheduling]
    words += [] if config.scheduling == "fifo" else [f"lambda {config.fairness_lambda:g}"]
    words += ["sharers counted"] if config.scheduling == "calibrated-srjf" and config.sharers == "count" else []
    words += ["cache-miss tokens"] if config.jct_model == "cache-miss" else []
    words += [] if config.max_queue_s is None else [f"at most {config.max_queue_s:g} s"]
    words += [] if config.pack_step_tokens == 0 else ["packed"]
    return ", ".join(words)


class SimulatedEngine:
    """One engine on a simulated clock: its policy, calibration and prefix cache.

    Args:
        jct_ms: time of a forward pass.
        durable_tokens: KV slots of the prefix cache.
    """

    def __init__(self, config: PrefillConfig, jct_ms: FittedJct, durable_tokens: int, page_tokens: int) -> None:
        self._jct_ms = jct_ms
        self._page_tokens = page_tokens
        self._cache = SimulatedCache(durable_tokens // page_tokens)
        settings = settings_of(config, jct_ms, page_tokens)._replace(kv_tokens=durable_tokens // page_tokens)
        self._policy = make(config.scheduling, settings, is_fair=False)
        self._predictor = settings.predictor
        self._calibration = Calibration(self._cache.tree, self._policy)
        self._cache.connect(self._calibration, self._calibration.advisor)
        self._symbols = Symbols(page_tokens)
        self._waiting: dict[Job, Arrival] = {}

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def add(self, arrival: Arrival) -> None:
        job = self._symbols.job_of(arrival)
        self._waiting[job] = arrival
        self._calibration.add(job)

    def run_step(self, now_s: float) -> list[Served]:
        """Runs the step that begins now: its requests, all with one finish; empty if the policy runs none."""
        run, refuse = self._policy.decide(now_s)
        for job in refuse:  # arrivals have no deadline, but a policy may refuse by itself
            self._calibration.remove(job)
            del self._waiting[job]
        if not run:
            return []
        plans = self._cache.begin(run)
        predicted = None
        if self._predictor is not None:  # in the policy's own units
            predicted = self._predictor.model.of_step([(job.n_priced_tokens, job.n_reused_tokens) for job in run])
        self._policy.started(run)
        for job in run:
            self._calibration.remove(job)
        served = [self._waiting.pop(job) for job in run]
        cached = [
            min(plan.n_reused * self._page_tokens, arrival.n_tokens - 1)
            for plan, arrival in zip(plans, served, strict=True)
        ]
        took_ms = sum(self._jct_ms.of_step([(one.n_tokens, n) for one, n in zip(served, cached, strict=True)]))
        self._cache.end(run, plans)
        if predicted is not None and self._predictor is not None:
            self._predictor.observe(predicted, took_ms)
        finish_s = now_s + took_ms / 1000
        return [Served(one.arrival_s, now_s, finish_s, one.n_tokens, n) for one, n in zip(served, cached, strict=True)]


def replay(
    arrivals: Iterable[Arrival],
    config: PrefillConfig,
    jct_ms: FittedJct,
    durable_tokens: int,
    *,
    page_tokens: int = 50,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Served]:
    """Yields requests in the order in which their steps begin.

    Args:
        arrivals: in time order.
        config: the options of the engine.
        jct_ms: time of a forward pass.
        durable_tokens: KV slots of the prefix cache.
    """
    engine = SimulatedEngine(config, jct_ms, durable_tokens, page_tokens)
    coming = iter(arrivals)
    next_one = next(coming, None)
    now_s, n_served = 0.0, 0
    while next_one is not None or engine.n_waiting:
        if not engine.n_waiting:
            assert next_one is not None
            now_s = max(now_s, next_one.arrival_s)
        while next_one is not None and next_one.arrival_s <= now_s:
            engine.add(next_one)
            next_one = next(coming, None)
        step = engine.run_step(now_s)
        if step:
            now_s = step[0].finish_s
        elif engine.n_waiting:  # a policy that lets jobs wait decides again at the next arrival
            if next_one is None:
                return
            now_s = next_one.arrival_s
        for served in step:
            yield served
            n_served += 1
            if on_progress is not None and n_served % 1000 == 0:
                on_progress(n_served)


def settings_of(config: PrefillConfig, jct_ms: FittedJct, page_tokens: int) -> PolicySettings:
    """Makes the settings of a policy whose jobs count pages."""
    max_requests = arguments.most_requests_of_step(config) or sys.maxsize
    pack_tokens = jct_ms.full_price_tokens() if config.pack_step_tokens is None else config.pack_step_tokens
    most = pack_tokens if pack_tokens is not None else max_requests * page_tokens  # a token costs nothing
    least_led = max(LEAST_LED_TOKENS // page_tokens, 1) if EVICT.is_on(config) else 0
    step = StepSize(max(most // page_tokens, 1), max_requests, least_led_tokens=least_led) if most else StepSize()
    return PolicySettings.of(
        step,
        jct_ms=jct_ms if config.jct_model == "fitted" else None,
        fairness_lambda=config.fairness_lambda,
        max_queue_s=config.max_queue_s,
        counts_sharers=config.sharers == "count",
        unit_tokens=page_tokens,
    )


class Symbols:
    """Turns arrivals into jobs whose tokens are pages: the pages of its prefix, which others share, and its own."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._numbers = itertools.count()
        self._prefixes: dict[str, array[int]] = {}
        self._page_of_hash: dict[int, int] = {}
        self._n_jobs = 0

    def job_of(self, arrival: Arrival) -> Job:
        pages = self.of(arrival)
        self._n_jobs += 1
        most_cached_tokens = len(pages) - 1
        return Job(pages, arrival.arrival_s, most_cached_tokens, rid=f"simulated-{self._n_jobs}")

    def of(self, arrival: Arrival) -> array[int]:
        if arrival.pages:  # of a request log, whose pages have the size of this replay's
            pages = array("q", (self._page_of_hash.setdefault(one, next(self._numbers)) for one in arrival.pages))
            n_own = max(-(-arrival.n_tokens // self._page_tokens) - len(pages), 1)
            return pages + array("q", itertools.islice(self._numbers, n_own))
        n_prefix = arrival.prefix_tokens // self._page_tokens
        prefix = self._prefixes.setdefault(arrival.prefix_id, array("q"))
        while len(prefix) < n_prefix:  # the longest that this prefix id has had
            prefix.append(next(self._numbers))
        n_tail = max(-(-arrival.n_tokens // self._page_tokens) - n_prefix, 1)
        return prefix[:n_prefix] + array("q", itertools.islice(self._numbers, n_tail))
