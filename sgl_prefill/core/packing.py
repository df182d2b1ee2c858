"""Which jobs share a step, and how many steps they take (past the paper, which runs one a step).

A prefill of few tokens costs as much as reading the weights and starting the step: hits of 15 to 150 tokens cannot fill a
machine alone. So a step takes the best job and, in order, others until its tokens cost their full price.

Jobs that wait for the same prefix follow the first of them in its step (`kv_plan`): every layer writes all K and V before it
attends, so a follower finds its leader's there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from sgl_prefill.core.jct import token_features
from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_plan import ceil_to

# A shorter prefix than this is waited for. On a host following pays from the shortest prefix on that was measured
# (benchmarks/branches, `threshold`); on a device a step with followers cannot be replayed from a CUDA graph.
LEAST_LED_TOKENS, LEAST_LED_TOKENS_ON_DEVICE = 8, 64
# Candidates looked at per step: many may have to wait for each other.
LOOK_AT = 256
# Limit on the branches of a step: each is a sequence of the forward pass, with a row of the slot table (`core.branches`).
MOST_BRANCHES = 256


class StepSize(NamedTuple):
    """How much runs in one step."""

    max_tokens: int = 0  # computed tokens of a step of several jobs; 0: one job a step
    max_requests: int = 1
    page_size: int = 1  # computed tokens are counted in whole pages
    least_led_tokens: int = 0  # a job follows another for so many tokens at least; 0: none follows
    pair_tokens: float = 0.0  # computed tokens that cost as much as attention of one token to one; 0: it is not counted

    @property
    def is_one(self) -> bool:
        return self.max_tokens == 0 or self.max_requests == 1

    def tokens_of(self, n_input_tokens: int, n_cached_tokens: int) -> int:
        """Tokens that a job takes of a step; a longer job fills a step alone."""
        n_tokens = self.price(n_input_tokens, n_cached_tokens)
        return n_tokens if self.is_one else min(n_tokens, self.max_tokens)

    def price(self, n_input_tokens: int, n_cached_tokens: int) -> int:
        """Tokens that a job computes, in whole pages, and its attention in tokens of the same time."""
        n_miss, n_pairs, _ = token_features(n_input_tokens, n_cached_tokens)
        return ceil_to(n_miss, self.page_size) + round(self.pair_tokens * n_pairs)


CountShared = Callable[[Job, Job], int]  # tokens that both jobs begin with, in whole pages


def nothing_shared(one: Job, other: Job) -> int:
    return 0


def pack(
    in_order: Iterable[Job],
    size: StepSize,
    count_shared: CountShared = nothing_shared,
    kv_tokens: int | None = None,
) -> list[Job]:
    """Chooses the jobs of the next step, in order; the first is always among them.

    Others join while all of them take at most `max_tokens`. Of jobs that wait for the same page the first computes it, and
    the others follow it, or find that page cached in a later step: nothing is computed twice. Followers of a prefix that is
    longer than the cache would find only a part of it there, so as many tokens of them as the first job has join a full step.
    Others do not join jobs whose answer is chosen at random: SGLang would choose for all of them.

    Args:
        in_order: waiting jobs, the best first. Sets the leaders of the picked ones.
        kv_tokens: capacity of the prefix cache; None: unlimited.
    """
    picked: list[Job] = []
    bursts: dict[Hashable, _Burst] = {}
    n_tokens = n_first = n_branches = 0
    is_full = False
    for job in itertools.islice(in_order, 1 if size.is_one else LOOK_AT):
        job.leader, job.n_led_tokens = None, 0
        if picked and (job.runs_alone or picked[0].runs_alone):
            break
        if picked and bool(job.n_sampling_tokens) != bool(picked[0].n_sampling_tokens):
            continue
        burst = bursts.get(job.next_page)
        if burst is not None and not burst.lead(job, size):
            continue
        is_lost = kv_tokens is not None and job.n_led_tokens > kv_tokens  # what it would wait for
        if is_full and not is_lost:
            continue
        n_here = size.price(job.n_priced_tokens, job.n_reused_tokens)
        most_tokens = max(size.max_tokens, 2 * n_first) if is_lost else size.max_tokens
        if picked and (n_tokens + n_here > most_tokens or n_branches + job.n_branches > MOST_BRANCHES):
            is_full = True
            if not any(burst.is_longer_than(kv_tokens) for burst in bursts.values()):
                break
            continue
        if burst is not None:
            burst.add(job, size)
        elif job.next_page is not None:
            bursts[job.next_page] = _Burst(job, count_shared)
        picked.append(job)
        n_first = n_first or n_here
        n_tokens, n_branches = n_tokens + n_here, n_branches + job.n_branches
        if len(picked) >= size.max_requests:
            break
    return picked


class _Burst:
    """Picked jobs that wait for one page: a tree of followers."""

    def __init__(self, first: Job, count_shared: CountShared) -> None:
        self._first, self._count_shared = first, count_shared
        # By leader, the length of what is shared with it, and the page that comes next.
        self._followers: dict[tuple[Job, int, bytes], Job] = {}

    def lead(self, job: Job, size: StepSize) -> bool:
        """Finds the job's leader: the picked one that it shares most with. False where it has to wait."""
        if size.least_led_tokens == 0 or job.decodes or self._first.decodes:
            return False
        leader = self._first
        n_shared = self._count_shared(leader, job)
        while (closer := self._followers.get((leader, n_shared, _page(job, n_shared, size)))) is not None:
            leader, n_shared = closer, self._count_shared(closer, job)
        n_shared = min(n_shared, job.most_cached_tokens) // size.page_size * size.page_size
        if n_shared - job.n_cached_tokens < size.least_led_tokens:
            return False
        job.leader, job.n_led_tokens = leader, n_shared
        return True

    def add(self, job: Job, size: StepSize) -> None:
        assert job.leader is not None
        self._followers.setdefault((job.leader, job.n_led_tokens, _page(job, job.n_led_tokens, size)), job)

    def is_longer_than(self, kv_tokens: int | None) -> bool:
        return kv_tokens is not None and self._first.n_input_tokens > kv_tokens


def _page(job: Job, start: int, size: StepSize) -> bytes:
    return job.tokens[start : start + size.page_size].tobytes()


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
