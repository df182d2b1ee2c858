"""Metrics collectors without metrics, for an engine without HTTP. `--enable-metrics` also switches on SGLang's request times,
which this package needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.observability import metrics_collector as stock


class Silent:
    """Null object for a Prometheus metric and its return values."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Silent:
        return self

    def __getattr__(self, name: str) -> Silent:
        return self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _silent(collector: type) -> type:
    classes = ("_counter_cls", "_gauge_cls", "_histogram_cls", "_summary_cls")
    return type(f"Silent{collector.__name__}", (collector,), dict.fromkeys(classes, Silent))


# For `ServerArgs.stat_loggers`.
COLLECTORS: dict[str, type] = {
    stock.STAT_LOGGER_ROLE_SCHEDULER: _silent(stock.SchedulerMetricsCollector),
    stock.STAT_LOGGER_ROLE_TOKENIZER: _silent(stock.TokenizerMetricsCollector),
    stock.STAT_LOGGER_ROLE_RADIX_CACHE: _silent(stock.RadixCacheMetricsCollector),
}


def are_silent(collector: Any) -> bool:
    return getattr(collector, "_counter_cls", None) is Silent
