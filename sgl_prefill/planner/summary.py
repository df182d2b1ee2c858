"""A row of numbers per replay, and the distribution of its latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Served(NamedTuple):
    """One request of a replay."""

    arrival_s: float
    start_s: float
    finish_s: float
    n_tokens: int
    n_cached_tokens: int

    @property
    def latency_s(self) -> float:
        return self.finish_s - self.arrival_s


class Summary(NamedTuple):
    """One setting of a replay."""

    name: str
    n_requests: int
    token_saving: float  # share of all input tokens that the cache held
    hit_rate: float  # share of requests that found half of their tokens or more
    requests_per_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    longest_wait_s: float
    latencies_s: list[float]  # sorted

    def row(self) -> list[str]:
        percents = [f"{100 * value:.2f}" for value in (self.token_saving, self.hit_rate)]
        numbers = [self.requests_per_s, self.mean_s, self.p50_s, self.p99_s, self.longest_wait_s]
        return [self.name, *percents, *(f"{number:.3f}" for number in numbers)]


HEADER = ["setting", "tokens saved %", "hits %", "requests/s", "mean s", "P50 s", "P99 s", "longest wait s"]


def summary_of(name: str, served: Sequence[Served]) -> Summary:
    """Summarizes at least one request, in the order in which their steps began."""
    latencies_s = sorted(one.latency_s for one in served)
    return Summary(
        name=name,
        n_requests=len(served),
        token_saving=sum(one.n_cached_tokens for one in served) / sum(one.n_tokens for one in served),
        hit_rate=sum(2 * one.n_cached_tokens >= one.n_tokens for one in served) / len(served),
        requests_per_s=len(served) / max(max(one.finish_s for one in served) - served[0].arrival_s, 1e-9),
        mean_s=sum(latencies_s) / len(latencies_s),
        p50_s=percentile(latencies_s, 50),
        p99_s=percentile(latencies_s, 99),
        longest_wait_s=max(one.start_s - one.arrival_s for one in served),
        latencies_s=latencies_s,
    )


def show(summaries: Sequence[Summary]) -> None:
    """Prints a row for each."""
    rows = [HEADER, *(summary.row() for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that `percent` of all values do not exceed."""
    return sorted_values[max(math.ceil(len(sorted_values) * percent / 100) - 1, 0)]


def plot(summaries: list[Summary], path: Path) -> None:
    """Draws the latency CDF of each setting (the paper's Fig. 11)."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("sgl_prefill: --plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for summary in summaries:
        share = [(index + 1) / len(summary.latencies_s) for index in range(len(summary.latencies_s))]
        axes.plot(summary.latencies_s, share, label=summary.name)
    axes.set(
        xlabel="latency in seconds", ylabel="share of requests", xscale="log", title="Simulated latency per setting"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
