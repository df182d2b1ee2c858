"""Which requests share a step, and how many steps they take (past the paper, which runs one a step).

A prefill of few tokens costs as much as reading the weights and starting the step: hits of 15 to 150 tokens cannot fill a
machine alone. So a step takes the best request and, in order, others until its tokens cost their full price.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple, TypeVar

Request = TypeVar("Request", bound=Hashable)

# A long run of candidates that must wait for each other is not searched to its end.
LOOK_AT = 256


def pack(
    in_order: Iterable[Request],
    miss_tokens: Callable[[Request], int],
    waits_for: Callable[[Request], Hashable | None],
    max_tokens: int,
    max_requests: int,
) -> list[Request]:
    """The requests of the next step, in order; the first is always among them.

    Args:
        in_order: waiting requests, the best first.
        miss_tokens: what the prefix cache does not hold of a request. Others join while the sum is at most `max_tokens`.
        waits_for: names the next uncached page of a request, None where it has none. Of requests with the same page only the
            first goes: the others will find that page cached, and nothing is computed twice.
    """
    picked: list[Request] = []
    pages: set[Hashable] = set()
    n_tokens = 0
    for request in itertools.islice(in_order, LOOK_AT):
        n_here = miss_tokens(request)
        if picked and n_tokens + n_here > max_tokens:
            break
        page = waits_for(request)
        if page is not None and page in pages:
            continue
        pages.add(page)
        picked.append(request)
        n_tokens += n_here
        if len(picked) >= max_requests:
            break
    return picked


class Steps(NamedTuple):
    """How requests fill steps."""

    n_steps: int
    room_tokens: int  # that the last of them leaves to others, as are
    room_requests: int


def fill_steps(miss_tokens: Collection[int], max_tokens: int, max_requests: int) -> Steps:
    """The steps of these requests, where each is filled to its end; a request that is longer than a step has one to itself.

    One request a step where `max_tokens` is 0.
    """
    if max_tokens == 0:
        return Steps(len(miss_tokens), 0, 0)
    n_tokens = sum(min(n_miss, max_tokens) for n_miss in miss_tokens)
    n_steps = max(-(-n_tokens // max_tokens), -(-len(miss_tokens) // max_requests))
    return Steps(n_steps, n_steps * max_tokens - n_tokens, n_steps * max_requests - len(miss_tokens))
