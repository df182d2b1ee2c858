"""What the policy does, in SGLang's Prometheus endpoint (`/metrics`), beside and with the labels of SGLang's own metrics."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
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

        names = list(labels)

        def gauge(name: str, meaning: str) -> Any:
            made = Gauge(f"sglang:prefill_{name}", meaning, names, multiprocess_mode="mostrecent")
            return made.labels(**labels)

        def counter(name: str, meaning: str) -> Any:
            return Counter(f"sglang:prefill_{name}", meaning, names).labels(**labels)

        def histogram(name: str, meaning: str, buckets: Sequence[float]) -> Any:
            return Histogram(f"sglang:prefill_{name}", meaning, names, buckets=buckets).labels(**labels)

        self._waiting = gauge("waiting_requests", "Requests that wait for their step.")
        self._oldest = gauge("oldest_wait_seconds", "How long the oldest waiting request has waited.")
        self._p99 = gauge("p99_wait_seconds", "99th percentile of how long the waiting requests have waited.")
        self._p99_read_s = -math.inf
        self._starvation = gauge(
            "starvation_seconds", "How long the oldest waiting request has waited while a later one was taken."
        )
        self._wait = histogram("wait_seconds", "Wait of a request until its step began.", _SECONDS)
        self._overhead = histogram(
            "policy_seconds", "Time that the scheduling policy took of a step.", _OVERHEAD_SECONDS
        )
        self._error = histogram(
            "jct_error_ratio",
            "Difference of predicted and actual time of a step over the actual one.",
            _ERROR_RATIOS,
        )
        self._cached = counter("cached_tokens", "Input tokens found in the prefix cache.")
        self._kept = counter("kept_tokens", "Input tokens whose KV was kept in the prefix cache.")
        self._evicted = counter("evicted_tokens", "Input tokens whose KV lived for one layer.")

    def queue(self, order: SrjfQueue[Any], now_s: float) -> None:
        """What waits after a step; the 99th percentile is looked up once a second, since it costs O(waiting requests)."""
        self._waiting.set(len(order))
        oldest = order.oldest()
        self._oldest.set(0.0 if oldest is None else max(now_s - order.waiting(oldest).arrival_s, 0.0))
        if now_s - self._p99_read_s >= 1.0:
            self._p99_read_s = now_s
            ages_s = heapq.nlargest(len(order) // 100 + 1, (now_s - order.waiting(req).arrival_s for req in order))
            self._p99.set(max(ages_s[-1], 0.0) if ages_s else 0.0)

    def starvation(self, passed_over_s: float) -> None:
        """Of the request that has waited longest, as a step begins."""
        self._starvation.set(passed_over_s)

    def overhead(self, policy_s: float) -> None:
        """Of the policy in the step that has ended."""
        self._overhead.observe(policy_s)

    def wait(self, wait_s: float) -> None:
        """Of a request that is about to run."""
        self._wait.observe(max(wait_s, 0.0))

    def request(self, facts: dict[str, Any], n_cached: int) -> None:
        """A request has run; `facts` are those of its reply."""
        self._cached.inc(n_cached)
        if "kept_tokens" in facts:
            self._kept.inc(facts["kept_tokens"])
            self._evicted.inc(facts["evicted_tokens"])

    def prediction(self, predicted_ms: float, actual_ms: float) -> None:
        """Of the step that has just run."""
        if actual_ms > 0:
            self._error.observe(abs(predicted_ms - actual_ms) / actual_ms)
