"""Which requests share a step."""

from __future__ import annotations

from typing import NamedTuple

from sgl_prefill.core.jct import FittedJct
from sgl_prefill.core.packing import LOOK_AT, Steps, fill_steps, pack


class Job(NamedTuple):
    name: str
    miss_tokens: int
    page: str | None = None


def packed(jobs: list[Job], max_tokens: int, max_requests: int = 100) -> str:
    picked = pack(jobs, lambda job: job.miss_tokens, lambda job: job.page, max_tokens, max_requests)
    return "".join(job.name for job in picked)


def test_others_join_in_order_while_their_tokens_fit() -> None:
    """C does not fit, and D, which would, is behind it: the order is the policy's."""
    jobs = [Job("A", 10), Job("B", 20), Job("C", 30), Job("D", 1)]
    assert packed(jobs, max_tokens=30) == "AB"
    assert packed(jobs, max_tokens=31) == "AB"
    assert packed(jobs, max_tokens=60) == "ABC"
    assert packed(jobs, max_tokens=61) == "ABCD"
    assert packed(jobs, max_tokens=61, max_requests=2) == "AB"


def test_the_best_one_runs_however_long_it_is() -> None:
    """A miss of 14,000 tokens exceeds any sensible limit."""
    assert packed([Job("A", 14_000), Job("B", 1)], max_tokens=100) == "A"
    assert packed([], max_tokens=100) == ""


def test_of_those_that_wait_for_one_page_only_the_first_goes() -> None:
    """A and C would both compute page p; B and D need nothing new from each other. C's tokens do not count."""
    jobs = [Job("A", 10, "p"), Job("B", 10, "q"), Job("C", 10, "p"), Job("D", 10), Job("E", 10)]
    assert packed(jobs, max_tokens=40) == "ABDE"


def test_a_long_run_of_sharers_is_not_searched_to_its_end() -> None:
    """10,000 requests of one new user must not cost 10,000 looks in each step."""
    seen = 0

    def miss_tokens(job: Job) -> int:
        nonlocal seen
        seen += 1
        return job.miss_tokens

    jobs = [Job(str(n), 1, "same") for n in range(10_000)]
    assert len(pack(jobs, miss_tokens, lambda job: job.page, 100, 100)) == 1
    assert seen == LOOK_AT


def test_the_full_price_begins_where_a_steps_fixed_cost_is_a_tenth_of_its_time() -> None:
    """9 ms a step and 0.1 ms a token: 810 tokens cost 90 ms with the step. Free tokens never fill a step."""
    model = FittedJct(step_ms=9.0, miss_token_ms=0.1, pair_ms=0.0, cached_token_ms=0.0)
    n_tokens = model.full_price_tokens()
    assert n_tokens == 810
    assert model(n_tokens, 0) == 90.0
    assert FittedJct(9.0, 0.0, 0.0, 0.0).full_price_tokens() is None


def test_steps_are_filled_and_a_long_request_has_one_to_itself() -> None:
    """10 of 30 tokens fill 3 steps of 100; a miss of 14,000 takes one, not 140; places run out before tokens do."""
    assert fill_steps([30] * 10, max_tokens=100, max_requests=32) == Steps(3, room_tokens=0, room_requests=86)
    assert fill_steps([14_000, 50], max_tokens=100, max_requests=32) == Steps(2, room_tokens=50, room_requests=62)
    assert fill_steps([1] * 10, max_tokens=100, max_requests=4) == Steps(3, room_tokens=290, room_requests=2)
    assert fill_steps([1] * 10, max_tokens=0, max_requests=1) == Steps(10, room_tokens=0, room_requests=0)
