"""Jobs that wait for one prefix follow the first of them in its step."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import TokenRows
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize, pack
from sgl_prefill.core.policies.whole_job import WholeJob
from sgl_prefill.core.policy import PolicySettings

STEP = StepSize(1000, 100, least_led_tokens=4)


def burst(*prompts: str, cached: int = 0, **fields: Any) -> list[Job]:
    """Jobs whose tokens are letters. All of one call wait for the page behind what is cached of them."""
    jobs = [Job(array("q", map(ord, prompt)), 0.0, len(prompt) - 1, **fields) for prompt in prompts]
    for one in jobs:
        one.n_cached_tokens, one.next_page = cached, prompts[0][cached]
    return jobs


def count_shared(one: Job, other: Job) -> int:
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((n for n, (left, right) in enumerate(pairs) if left != right), min(len(one.tokens), len(other.tokens)))


def packed(jobs: list[Job], step: StepSize = STEP, kv_tokens: int | None = None) -> list[str]:
    """Each with its leader and how many tokens that computes for it."""
    found = pack(jobs, step, count_shared, kv_tokens)
    names = {one: "".join(map(chr, one.tokens)) for one in jobs}
    return [names[one] + (f" < {names[one.leader]} {one.n_led_tokens}" if one.leader else "") for one in found]


def test_a_follower_takes_the_tokens_of_its_own_from_a_step() -> None:
    """10 + 2 + 2 tokens. Without followers only the first goes."""
    jobs = burst("profilexAA", "profilexBB", "profilexCC")
    assert packed(jobs, STEP._replace(max_tokens=14)) == [
        "profilexAA", "profilexBB < profilexAA 8", "profilexCC < profilexAA 8",
    ]  # fmt: skip
    assert [one.n_reused_tokens for one in jobs] == [0, 8, 8]
    assert packed(jobs, STEP._replace(max_tokens=13)) == ["profilexAA", "profilexBB < profilexAA 8"]
    assert packed(jobs, STEP._replace(least_led_tokens=0)) == ["profilexAA"]
    assert jobs[0].leader is None


def test_followers_of_followers_form_a_tree() -> None:
    """Each follows the picked job that it shares most with."""
    assert packed(burst("profile 1 a", "profile 2 a", "profile 2 b", "profile 1 b", "profile 2 ac")) == [
        "profile 1 a",
        "profile 2 a < profile 1 a 8",
        "profile 2 b < profile 2 a 10",
        "profile 1 b < profile 1 a 10",
        "profile 2 ac < profile 2 a 11",
    ]


def test_a_short_prefix_is_waited_for() -> None:
    assert packed(burst("abcXX", "abcYY")) == ["abcXX"]
    assert packed(burst("abcdXX", "abcdYY")) == ["abcdXX", "abcdYY < abcdXX 4"]
    assert packed(burst("profilexAA", "profilexBB", cached=5)) == ["profilexAA"], "what is cached does not count"


def test_pages_are_whole_and_the_last_token_is_always_computed() -> None:
    def in_pages(one: Job, other: Job) -> int:
        return count_shared(one, other) // 4 * 4

    step = STEP._replace(page_size=4)
    first, second, same = burst("profilexyzA", "profilexyzB", "profilexyzAB")
    assert pack([first, second, same], step, in_pages) == [first, second, same]
    assert [second.n_led_tokens, same.n_led_tokens] == [8, 8]
    assert packed(burst("profile", "profile")) == ["profile", "profile < profile 6"]


def test_who_writes_neither_leads_nor_follows() -> None:
    writing = burst("profilexAA", "profilexBB", most_output_tokens=5)
    assert packed(writing) == ["profilexAA"]
    (reading,) = burst("profilexCC")
    assert packed([*writing, reading]) == ["profilexAA"]
    assert packed([reading, *writing]) == ["profilexCC"]


@pytest.mark.parametrize(("kv_tokens", "n_together"), [(None, 1), (50, 1), (30, 7)])
def test_a_prefix_that_the_cache_cannot_hold_takes_its_followers_along(kv_tokens: int | None, n_together: int) -> None:
    """The first fills the step alone. Six of the others compute as much as it; one that shares nothing waits."""
    jobs = burst(*("p" * 40 + str(number) * 8 for number in range(8)))
    (other,) = burst("another")
    step = STEP._replace(max_tokens=20)
    assert len(packed([jobs[0], other, *jobs[1:]], step, kv_tokens)) == n_together
    assert pack([jobs[0], other, *jobs[1:]], step, count_shared, kv_tokens) == jobs[:n_together]


def test_a_leader_of_an_earlier_step_is_forgotten() -> None:
    first, second = burst("profilexAA", "profilexBB")
    packed([first, second])
    assert packed([second, first]) == ["profilexBB", "profilexAA < profilexBB 8"]
    assert second.leader is None


def test_the_groups_of_a_whole_job_run_with_their_first_row() -> None:
    """Two groups of three rows of 12 tokens, of which 10 are shared, and a step of 28: one group and the next one's first row."""
    rows = [[group] * 10 + [100 + row, row] for group in (1, 2) for row in range(3)]
    order = depth_first(TokenRows.of(rows))

    def policy(step: StepSize, kv_tokens: int | None = None) -> WholeJob:
        waiting = WholeJob(PolicySettings(step, kv_tokens=kv_tokens))
        waiting.count_shared = count_shared
        for place, row in enumerate(order.rows.tolist()):
            one = Job(array("q", rows[row]), 0.0, 11, planned=order.row(place))
            one.next_page = rows[row][0]
            waiting.add(one)
        return waiting

    def groups(waiting: WholeJob) -> list[int]:
        run = waiting.decide(0.0).run
        for one in run:
            waiting.remove(one)
        return [one.tokens[0] for one in run]

    step = STEP._replace(max_tokens=28)
    assert groups(policy(step)) == [1, 1, 1, 2]
    assert groups(policy(step._replace(least_led_tokens=0))) == [1, 2]
    assert groups(policy(step, kv_tokens=15)) == [1, 1, 1], "the cache has no room for another prefix"
