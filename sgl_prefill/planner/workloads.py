"""Traces: the two workloads of PrefillOnly (section 7.1), trace files, and request logs of a server (`--request-log`).

Where the paper is ambiguous there is an option. A trace is a list of arrivals in time order; a request is a prefix, which others
may share, and a tail of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from sgl_prefill.planner.summary import Served
from sgl_prefill.port.steps.request_log import PAGE_TOKENS


class Arrival(NamedTuple):
    """One request of a trace; one JSON object a line in a file."""

    arrival_s: float
    prefix_id: str
    prefix_tokens: int
    tail_tokens: int  # at least 1
    pages: tuple[int, ...] = ()  # hashes of its prefixes, of a request log; then `prefix_tokens` are in these pages

    @property
    def n_tokens(self) -> int:
        return self.prefix_tokens + self.tail_tokens


def post_recommendation(
    rng: random.Random,
    requests_per_s: float,
    *,
    n_users: int = 20,
    n_posts: int = 50,
    post_tokens: int = 150,
    profile_mean_tokens: float = 14_000,
    profile_deviation_tokens: float = 3_000,
    profile_range_tokens: tuple[int, int] | None = (11_000, 17_000),
    arrivals: Literal["burst", "single", "at-once"] = "burst",
) -> list[Arrival]:
    """Makes WL1: `n_posts` requests a user that share the user's profile.

    Args:
        requests_per_s: mean rate of the Poisson process, in requests; ignored for "at-once".
        profile_range_tokens: lengths outside are drawn again (the paper's Table 1 prints this range beside a normal
            distribution that exceeds it); None: plain normal distribution.
        arrivals: "burst": a user's requests come together, and users are the Poisson process; "single": each request is, and
            the users are mixed; "at-once": all at 0, as where the paper measures saturation.
    """
    users = [
        (f"user-{user}", _normal(rng, profile_mean_tokens, profile_deviation_tokens, profile_range_tokens))
        for user in range(n_users)
    ]
    if arrivals == "burst":
        times = _poisson(rng, requests_per_s / n_posts)
        return [
            Arrival(at_s, name, n_tokens, post_tokens)
            for (name, n_tokens), at_s in zip(users, times, strict=False)
            for _ in range(n_posts)
        ]
    requests = [user for user in users for _ in range(n_posts)]
    rng.shuffle(requests)
    times = iter([0.0] * len(requests)) if arrivals == "at-once" else _poisson(rng, requests_per_s)
    return [Arrival(at_s, name, n_tokens, post_tokens) for (name, n_tokens), at_s in zip(requests, times, strict=False)]


def credit_verification(
    rng: random.Random, requests_per_s: float, *, n_users: int = 60, range_tokens: tuple[int, int] = (40_000, 60_000)
) -> list[Arrival]:
    """Makes WL2: one long request a user, nothing shared."""
    times = _poisson(rng, requests_per_s)
    return [
        Arrival(at_s, f"user-{user}", rng.randint(*range_tokens) - 1, 1)
        for user, at_s in zip(range(n_users), times, strict=False)
    ]


class Logged(NamedTuple):
    """A request log as a trace, and how its requests were served."""

    arrivals: list[Arrival]
    served: list[Served]


def read_log(path: Path) -> Logged | None:
    """Reads a request log of a server; None for another file. Raises ValueError naming the line that is not a request."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines or '"input_tokens"' not in lines[0]:
        return None
    arrivals, served = [], []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            arrival_s, n_tokens, pages = float(fields["arrival_s"]), int(fields["input_tokens"]), tuple(fields["pages"])
            start_s = arrival_s + fields["wait_ms"] / 1000
            finish_s = start_s + fields["actual_ms"] / 1000
            served.append(Served(arrival_s, start_s, finish_s, n_tokens, int(fields["cached_tokens"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; a line of a request log has arrival_s, ...") from error
        n_prefix = PAGE_TOKENS * len(pages)
        arrivals.append(Arrival(arrival_s, "", n_prefix, n_tokens - n_prefix, pages))
    arrivals.sort(key=lambda one: one.arrival_s)
    return Logged(arrivals, sorted(served, key=lambda one: one.start_s))


def read(path: Path) -> list[Arrival]:
    """Reads a trace file, sorted by time. Raises ValueError that names the line which is not an arrival."""
    arrivals = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            arrival = Arrival(
                float(fields["arrival_s"]),
                str(fields["prefix_id"]),
                int(fields["prefix_tokens"]),
                int(fields["tail_tokens"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: {error!r}; a line is"
                ' {"arrival_s": 0.5, "prefix_id": "user-1", "prefix_tokens": 14000, "tail_tokens": 150}'
            ) from error
        if not 0 <= arrival.arrival_s < float("inf") or arrival.prefix_tokens < 0 or arrival.tail_tokens < 1:
            raise ValueError(
                f"{path}, line {number}: a time >= 0, a prefix >= 0 and a tail >= 1 token are needed: {line}"
            )
        arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    fields = [{name: value for name, value in one._asdict().items() if name != "pages"} for one in arrivals]
    path.write_text("".join(json.dumps(one) + "\n" for one in fields))


def ceiling_of_saving(arrivals: list[Arrival]) -> float:
    """Returns the share of all tokens that an unlimited cache would save: every prefix is computed once."""
    if arrivals[0].pages or not arrivals[0].prefix_id:  # of a request log
        n_first = PAGE_TOKENS * len({page for arrival in arrivals for page in arrival.pages})
        n_all = sum(arrival.prefix_tokens for arrival in arrivals)
        return (n_all - n_first) / sum(arrival.n_tokens for arrival in arrivals)
    prefixes = {arrival.prefix_id: arrival.prefix_tokens for arrival in arrivals}
    n_prefix_tokens = sum(arrival.prefix_tokens for arrival in arrivals)
    return (n_prefix_tokens - sum(prefixes.values())) / sum(arrival.n_tokens for arrival in arrivals)


def _poisson(rng: random.Random, rate_per_s: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield at_s


def _normal(rng: random.Random, mean: float, deviation: float, limits: tuple[int, int] | None) -> int:
    while True:
        n_tokens = round(rng.gauss(mean, deviation))
        if (limits is None and n_tokens >= 0) or (limits is not None and limits[0] <= n_tokens <= limits[1]):
            return n_tokens
