"""Shortest remaining job first with continuous JCT calibration (PrefillOnly, section 6.3, Algorithm 1).

    score(r) = jct(n_input, n_cached) - fairness_lambda * T_queue;  the request with the smallest score runs next.

Line 11 of the printed algorithm stores `jct` where it must store `score`, else a request would be compared with the
wrong number; we keep the score. Calibration means that `n_cached` is read anew before every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from sgl_prefill.core.jct import JctModel

Request = TypeVar("Request")


class Waiting(NamedTuple):
    """What the policy must know of one waiting request at the moment of choice."""

    n_input_tokens: int
    n_cached_tokens: int  # longest prefix that the cache holds now, as far as the request may use it
    arrival_s: float  # on one clock for all requests
    rank: float = 0.0  # user-given priority class: a smaller rank always goes first; 0 where priorities are off


def pick_shortest(
    requests: Iterable[Request],
    describe: Callable[[Request], Waiting],
    *,
    jct: JctModel,
    fairness_lambda: float,
) -> Request | None:
    """The request to run next, or None where none waits. Ties go to the one that comes first in `requests`.

    All scores fall at the same rate as time passes, so their order is that of `jct + fairness_lambda * arrival`, and no
    clock is read. Args: `fairness_lambda` is in units of `jct` per second of waiting (tokens/s for the token proxy).
    """

    def order(request: Request) -> tuple[float, float]:
        waiting = describe(request)
        cost = jct(waiting.n_input_tokens, waiting.n_cached_tokens)
        return waiting.rank, cost + fairness_lambda * waiting.arrival_s

    return min(requests, key=order, default=None)
