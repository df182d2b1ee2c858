"""The policy's Prometheus metrics, in SGLang's `/metrics` with the labels of SGLang's own metrics."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.metric_list import BY_NAME
from sgl_prefill.core.policy import Policy


class Facts(NamedTuple):
    """Input tokens of a finished request."""

    n_cached: int  # prefix hit
    n_kept: int | None  # KV stays in the prefix cache; None if that of all tokens does
    n_evicted: int | None  # KV was in scratch, for one layer at a time


def starvation_s(policy: Policy, taken: Collection[Job], now_s: float) -> float:
    """Returns the wait of the oldest job where later ones are taken before it; else 0."""
    oldest = policy.oldest()
    if oldest is None or oldest in taken or oldest.arrival_s >= max(job.arrival_s for job in taken):
        return 0.0
    return max(now_s - oldest.arrival_s, 0.0)


class PolicyMetrics:
    """One instance per scheduler process. Make it once SGLang has set `PROMETHEUS_MULTIPROC_DIR`."""

    def __init__(self, labels: dict[str, str]) -> None:
        def made(name: str) -> Any:
            return BY_NAME[name].make(list(labels)).labels(**labels)

        self._waiting = made("waiting_requests")
        self._oldest = made("oldest_wait_seconds")
        self._p99 = made("p99_wait_seconds")
        self._p99_read_s = -math.inf
        self._starvation = made("starvation_seconds")
        self._wait = made("wait_seconds")
        self._overhead = made("policy_seconds")
        self._error = made("jct_error_ratio")
        self._cached = made("cached_tokens")
        self._kept = made("kept_tokens")
        self._evicted = made("evicted_tokens")

    def set_queue(self, policy: Policy, now_s: float) -> None:
        """Sets the queue's gauges after a step. The 99th percentile, which costs O(waiting requests), once a second."""
        self._waiting.set(len(policy.waiting))
        oldest = policy.oldest()
        self._oldest.set(0.0 if oldest is None else max(now_s - oldest.arrival_s, 0.0))
        if now_s - self._p99_read_s >= 1.0:
            self._p99_read_s = now_s
            n_longest = len(policy.waiting) // 100 + 1
            ages_s = heapq.nlargest(n_longest, (now_s - job.arrival_s for job in policy.waiting))
            self._p99.set(max(ages_s[-1], 0.0) if ages_s else 0.0)

    def set_starvation(self, policy: Policy, taken: Collection[Job], now_s: float) -> None:
        self._starvation.set(starvation_s(policy, taken, now_s))

    def observe_policy_time(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def observe_wait(self, wait_s: float) -> None:
        self._wait.observe(max(wait_s, 0.0))

    def count_request(self, facts: Facts) -> None:
        self._cached.inc(facts.n_cached)
        if facts.n_kept is not None and facts.n_evicted is not None:
            self._kept.inc(facts.n_kept)
            self._evicted.inc(facts.n_evicted)

    def observe_prediction(self, predicted_ms: float, actual_ms: float) -> None:
        if actual_ms > 0:
            self._error.observe(abs(predicted_ms - actual_ms) / actual_ms)
