"""The workloads of the comparison benchmarks as requests with token ids. Lengths and prompts do not depend on the rate."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from benchmarks import shapes
from benchmarks.harness.client import Due
from sgl_prefill.planner import workloads
from sgl_prefill.planner.workloads import Arrival

SHORT_MIX_TOKENS = (128, 512, 2048, 8192)
Arrivals = Literal["burst", "single"]


def post_recommendation(
    requests_per_s: float | None,
    arrivals: Arrivals,
    scale: int,
    *,
    n_users: int = 20,
    n_posts: int = 50,
    names_users: bool = False,
) -> list[Due]:
    """The paper's WL1, all numbers of tokens divided by `scale`. `requests_per_s` None: all at once, users mixed."""
    trace = workloads.post_recommendation(
        random.Random(0),
        requests_per_s or 1.0,
        n_users=n_users,
        n_posts=n_posts,
        post_tokens=150 // scale,
        profile_mean_tokens=14_000 / scale,
        profile_deviation_tokens=3_000 / scale,
        profile_range_tokens=(11_000 // scale, 17_000 // scale),
        arrivals="at-once" if requests_per_s is None else arrivals,
    )
    return with_tokens(trace, names_users=names_users)


def credit_verification(requests_per_s: float | None, scale: int, *, n_users: int = 60) -> list[Due]:
    """The paper's WL2, divided by `scale`."""
    lengths = random.Random(0)
    n_tokens = [lengths.randint(40_000 // scale, 60_000 // scale) for _ in range(n_users)]
    return alone(n_tokens, requests_per_s)


def short_mix(requests_per_s: float | None, n_each: int) -> list[Due]:
    """Four lengths in equal counts, shuffled; nothing shared."""
    n_tokens = [n for n in SHORT_MIX_TOKENS for _ in range(n_each)]
    random.Random(0).shuffle(n_tokens)
    return alone(n_tokens, requests_per_s)


def alone(n_tokens: Sequence[int], requests_per_s: float | None) -> list[Due]:
    """Requests of these lengths that share nothing, in this order."""
    times_s = poisson(requests_per_s, len(n_tokens))
    return with_tokens(
        Arrival(at_s, f"{number}", 0, n) for number, (at_s, n) in enumerate(zip(times_s, n_tokens, strict=True))
    )


def real_text() -> str:
    """Python's own documentation, which is on every machine."""
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def poisson(requests_per_s: float | None, n_requests: int) -> list[float]:
    """Arrival times in seconds; None: all at 0."""
    if requests_per_s is None:
        return [0.0] * n_requests
    rng, at_s, times_s = random.Random(1), 0.0, []
    for _ in range(n_requests):
        at_s += rng.expovariate(requests_per_s)
        times_s.append(at_s)
    return times_s


def with_tokens(trace: Iterable[Arrival], *, names_users: bool = False) -> list[Due]:
    """The tokens depend on the prefix and on how many requests had it before, not on the order of arrival. Who shares a prefix
    is one user, if users are named."""
    prefixes: dict[str, list[int]] = {}
    n_before: Counter[str] = Counter()
    dues = []
    for one in trace:
        if one.prefix_id not in prefixes:
            prefixes[one.prefix_id] = _tokens(one.prefix_id, one.prefix_tokens)
        prefix = prefixes[one.prefix_id]
        tail = _tokens(f"{one.prefix_id}, {n_before[one.prefix_id]}", one.tail_tokens)
        n_before[one.prefix_id] += 1
        dues.append(Due(one.arrival_s, [*prefix, *tail], user=one.prefix_id if names_users else ""))
    return dues


def _tokens(seed: str, n_tokens: int) -> list[int]:
    return shapes.token_ids(random.Random(seed), n_tokens)
