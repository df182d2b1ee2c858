"""Which jobs share a step, and how many steps they take (past the paper, which runs one a step).

A prefill of few tokens costs as much as reading the weights and starting the step: hits of 15 to 150 tokens cannot fill a
machine alone. So a step takes the best job and, in order, others until its tokens cost their full price.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_plan import ceil_to

# Candidates looked at per step: many may have to wait for each other.
LOOK_AT = 256
# Limit on the branches of a step: each is a sequence of the forward pass, with a row of the slot table (`core.branches`).
MOST_BRANCHES = 256


class StepSize(NamedTuple):
    """How much runs in one step."""

    max_tokens: int = 0  # computed tokens of a step of several jobs; 0: one job a step
    max_requests: int = 1
    page_size: int = 1  # computed tokens are counted in whole pages

    @property
    def is_one(self) -> bool:
        return self.max_tokens == 0 or self.max_requests == 1

    def tokens_of(self, n_miss_tokens: int) -> int:
        """Tokens that a job takes of a step, in whole pages; a longer job fills a step alone."""
        n_tokens = ceil_to(n_miss_tokens, self.page_size)
        return n_tokens if self.is_one else min(n_tokens, self.max_tokens)


def pack(in_order: Iterable[Job], size: StepSize) -> list[Job]:
    """Chooses the jobs of the next step, in order; the first is always among them.

    Others join while all of them compute at most `max_tokens`. Of jobs that wait for the same page only the first goes: the
    others will find that page cached, and nothing is computed twice.

    Args:
        in_order: waiting jobs, the best first.
    """
    if size.is_one:
        return list(itertools.islice(in_order, 1))
    picked: list[Job] = []
    pages: set[Hashable] = set()
    n_tokens = n_branches = 0
    for job in itertools.islice(in_order, LOOK_AT):
        n_here = ceil_to(job.n_miss_tokens, size.page_size)
        if picked and n_tokens + n_here > size.max_tokens:
            break
        n_branches += job.n_branches
        if picked and n_branches > MOST_BRANCHES:
            break
        if job.next_page is not None and job.next_page in pages:
            continue
        pages.add(job.next_page)
        picked.append(job)
        n_tokens += n_here
        if len(picked) >= size.max_requests:
            break
    return picked


class Steps(NamedTuple):
    """How jobs fill steps."""

    n_steps: int
    room_tokens: int  # tokens left in the last step
    room_requests: int  # requests left in the last step


def fill_steps(n_tokens: int, n_requests: int, size: StepSize) -> Steps:
    """Counts the steps of so many jobs, where each step is filled to its end. n_tokens: the sum of `size.tokens_of` each."""
    if size.is_one:
        return Steps(n_requests, 0, 0)
    n_steps = max(-(-n_tokens // size.max_tokens), -(-n_requests // size.max_requests))
    return Steps(n_steps, n_steps * size.max_tokens - n_tokens, n_steps * size.max_requests - n_requests)
