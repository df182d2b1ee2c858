"""Every metric of ours in a server's `/metrics`, in one list, from which counters, dashboard, rules and page are made."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

# SGLang's own prefix, colon and all, so that one query finds both; Prometheus keeps colons for recording rules.
PREFIX = "sglang:prefill_"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_OVERHEAD_SECONDS = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
_ERROR_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metric(NamedTuple):
    """One metric. Labels of its own have few values, all of them words of this engine, and never a client's."""

    name: str  # after the prefix, with its unit; of a counter without `_total`
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()  # besides SGLang's: model and ranks

    @property
    def exposed(self) -> str:
        """The name that a query begins with."""
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")

    def make(self, label_names: list[str]) -> Any:
        """Makes it in this process. SGLang has set `PROMETHEUS_MULTIPROC_DIR` by then: call it no earlier."""
        import prometheus_client as client

        name, names = f"{PREFIX}{self.name}", [*label_names, *self.labels]
        if self.kind == "gauge":
            return client.Gauge(name, self.meaning, names, multiprocess_mode="mostrecent")
        if self.kind == "counter":
            return client.Counter(name, self.meaning, names)
        return client.Histogram(name, self.meaning, names, buckets=self.buckets)


METRICS = (
    Metric("waiting_requests", "gauge", "Requests that wait for their step."),
    Metric("oldest_wait_seconds", "gauge", "How long the oldest waiting request has waited."),
    Metric("p99_wait_seconds", "gauge", "99th percentile of how long the waiting requests have waited."),
    Metric(
        "starvation_seconds", "gauge", "How long the oldest waiting request has waited while a later one was taken."
    ),
    Metric("wait_seconds", "histogram", "Wait of a request until its step began.", _SECONDS),
    Metric("policy_seconds", "histogram", "Time that the scheduling policy took of a step.", _OVERHEAD_SECONDS),
    Metric(
        "jct_error_ratio",
        "histogram",
        "Difference of predicted and actual time of a step over the actual one.",
        _ERROR_RATIOS,
    ),
    Metric("cached_tokens", "counter", "Input tokens found in the prefix cache."),
    Metric("kept_tokens", "counter", "Input tokens whose KV was kept in the prefix cache."),
    Metric("evicted_tokens", "counter", "Input tokens whose KV lived for one layer."),
    Metric("refused_requests", "counter", "Requests refused, by reason.", labels=("reason",)),
    Metric("text_tokens", "counter", "Tokens of long texts, by whether an earlier text had them.", labels=("cached",)),
    Metric("text_queue_requests", "gauge", "Requests whose long text waits for a thread that tokenises it."),
)
BY_NAME = {metric.name: metric for metric in METRICS}
