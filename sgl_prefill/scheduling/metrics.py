"""What the policy does, in SGLang's Prometheus endpoint (`/metrics`), beside and with the labels of SGLang's own metrics."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_prefill.core.srjf import SrjfQueue

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_OVERHEAD_SECONDS = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
_ERROR_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class PolicyMetrics:
    """One instance a scheduler process. SGLang has set `PROMETHEUS_MULTIPROC_DIR` by then: import no earlier."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = labels
        names = list(labels)
        self._waiting = Gauge(
            "sglang:prefill_waiting_requests",
            "Requests that wait for their step.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._oldest = Gauge(
            "sglang:prefill_oldest_wait_seconds",
            "How long the oldest waiting request has waited.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._p99 = Gauge(
            "sglang:prefill_p99_wait_seconds",
            "99th percentile of how long the waiting requests have waited.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._p99_read_s = -math.inf
        self._starvation = Gauge(
            "sglang:prefill_starvation_seconds",
            "How long the oldest waiting request has waited while a later one was taken.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._wait = Histogram(
            "sglang:prefill_wait_seconds", "Wait of a request until its step began.", names, buckets=_SECONDS
        )
        self._overhead = Histogram(
            "sglang:prefill_policy_seconds",
            "Time that the scheduling policy took of a step.",
            names,
            buckets=_OVERHEAD_SECONDS,
        )
        self._error = Histogram(
            "sglang:prefill_jct_error_ratio",
            "Difference of predicted and actual job completion time over the actual one.",
            names,
            buckets=_ERROR_RATIOS,
        )
        self._cached = Counter("sglang:prefill_cached_tokens", "Input tokens found in the prefix cache.", names)
        self._kept = Counter("sglang:prefill_kept_tokens", "Input tokens whose KV was kept in the prefix cache.", names)
        self._evicted = Counter("sglang:prefill_evicted_tokens", "Input tokens whose KV lived for one layer.", names)

    def queue(self, order: SrjfQueue[Any], now_s: float) -> None:
        """What waits after a step; the 99th percentile is looked up once a second, since it costs O(waiting requests)."""
        self._waiting.labels(**self._labels).set(len(order))
        oldest = order.oldest()
        self._oldest.labels(**self._labels).set(
            0.0 if oldest is None else max(now_s - order.waiting(oldest).arrival_s, 0.0)
        )
        if now_s - self._p99_read_s >= 1.0:
            self._p99_read_s = now_s
            ages_s = heapq.nlargest(len(order) // 100 + 1, (now_s - order.waiting(req).arrival_s for req in order))
            self._p99.labels(**self._labels).set(max(ages_s[-1], 0.0) if ages_s else 0.0)

    def starvation(self, passed_over_s: float) -> None:
        """Of the request that has waited longest, as a step begins."""
        self._starvation.labels(**self._labels).set(passed_over_s)

    def overhead(self, policy_s: float) -> None:
        """Of the policy in the step that has ended."""
        self._overhead.labels(**self._labels).observe(policy_s)

    def request(self, wait_s: float, facts: dict[str, Any], n_cached: int) -> None:
        """A request has run; `facts` are those of its reply."""
        self._wait.labels(**self._labels).observe(max(wait_s, 0.0))
        self._cached.labels(**self._labels).inc(n_cached)
        if "kept_tokens" in facts:
            self._kept.labels(**self._labels).inc(facts["kept_tokens"])
            self._evicted.labels(**self._labels).inc(facts["evicted_tokens"])

    def prediction(self, predicted_ms: float, actual_ms: float) -> None:
        """Of the request that has just run."""
        if actual_ms > 0:
            self._error.labels(**self._labels).observe(abs(predicted_ms - actual_ms) / actual_ms)
