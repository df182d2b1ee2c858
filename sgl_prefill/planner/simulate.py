"""Replay of a trace on a simulated clock: the engine's own policy, KV plan and radix tree; a JCT model for the forward pass.

Tokens are counted in pages, so that a prompt of 14,000 tokens is a key of some hundred symbols: a prefix is shared in whole
pages, as in an engine with pages of that size.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sgl_prefill import preflight
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies import POLICIES
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.planner.workloads import Arrival
from sgl_prefill.port.simulated_cache import SimulatedCache


def name_of(config: PrefillConfig) -> str:
    """Names what of these options tells one replay from another."""
    words = [config.scheduling]
    words += [] if config.scheduling == "fifo" else [f"lambda {config.fairness_lambda:g}"]
    words += ["sharers counted"] if config.scheduling == "calibrated-srjf" and config.sharers == "count" else []
    words += ["cache-miss tokens"] if config.jct_model == "cache-miss" else []
    words += [] if config.max_queue_s is None else [f"at most {config.max_queue_s:g} s"]
    words += [] if config.pack_step_tokens == 0 else ["packed"]
    return ", ".join(words)


class Served(NamedTuple):
    """One request of the replay."""

    arrival_s: float
    start_s: float
    finish_s: float
    n_tokens: int
    n_cached_tokens: int

    @property
    def latency_s(self) -> float:
        return self.finish_s - self.arrival_s


def replay(
    arrivals: Iterable[Arrival],
    config: PrefillConfig,
    jct_ms: FittedJct,
    durable_tokens: int,
    *,
    page_tokens: int = 50,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Served]:
    """Yields requests in the order in which they are served.

    Args:
        arrivals: in time order.
        config: the options of the engine.
        jct_ms: how long a forward pass takes.
        durable_tokens: KV slots of the prefix cache.
    """
    cache = SimulatedCache(durable_tokens // page_tokens)
    policy = POLICIES[config.scheduling](settings_of(config, jct_ms, page_tokens))
    calibration = Calibration(cache.tree, policy)
    cache.connect(calibration, calibration.advisor)
    symbols = _Symbols(page_tokens)
    coming = iter(arrivals)
    next_one = next(coming, None)
    arrival_of: dict[Job, Arrival] = {}
    now_s, n_served = 0.0, 0
    while next_one is not None or arrival_of:
        while next_one is not None and next_one.arrival_s <= now_s:
            pages = symbols.of(next_one)
            job = Job(pages, next_one.arrival_s, most_cached_tokens=len(pages) - 1)
            arrival_of[job] = next_one
            calibration.add(job)
            next_one = next(coming, None)
        run, refuse = policy.decide(now_s)
        for job in refuse:  # by a policy of one's own: arrivals of a trace have no deadline
            calibration.remove(job)
            del arrival_of[job]
        if not run:
            if next_one is None:
                break
            now_s = next_one.arrival_s
            continue
        plans = cache.begin(run)
        policy.started(run)
        for job in run:
            calibration.remove(job)
        served = [arrival_of.pop(job) for job in run]
        cached = [
            min(plan.n_cached * page_tokens, arrival.n_tokens - 1) for plan, arrival in zip(plans, served, strict=True)
        ]
        start_s = now_s
        work = jct_ms.of_step([(arrival.n_tokens, n) for arrival, n in zip(served, cached, strict=True)])
        now_s += sum(work) / 1000
        cache.end(run, plans)
        for arrival, n_cached in zip(served, cached, strict=True):
            yield Served(arrival.arrival_s, start_s, now_s, arrival.n_tokens, n_cached)
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


class _Symbols:
    """Keys of a request: its prefix's pages, the same for all that share it, and pages of its own."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._numbers = itertools.count()
        self._prefixes: dict[str, array[int]] = {}

    def of(self, arrival: Arrival) -> array[int]:
        n_prefix = arrival.prefix_tokens // self._page_tokens
        prefix = self._prefixes.setdefault(arrival.prefix_id, array("q"))
        while len(prefix) < n_prefix:  # the longest that this prefix id has had
            prefix.append(next(self._numbers))
        n_tail = max(-(-arrival.n_tokens // self._page_tokens) - n_prefix, 1)
        return prefix[:n_prefix] + array("q", itertools.islice(self._numbers, n_tail))
