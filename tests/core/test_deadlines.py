"""Deadlines: who is refused with what, and what a forecast counts."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from sgl_prefill.core.jct import FittedJct, Predictor
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from tests.core.jobs import job, srjf

MACHINE = FittedJct(step_ms=100.0, miss_token_ms=1.0, pair_ms=0.0, cached_token_ms=0.0, request_ms=5.0)


STEP = StepSize(100, 32)


def policy_of(*jobs: Job, step: StepSize = STEP) -> CalibratedSrjf:
    return srjf(*jobs, step=step, cost=MACHINE, predictor=Predictor(MACHINE))


def forecast(policy: CalibratedSrjf, one: Job) -> tuple[float, int]:
    found = policy.forecast(one)
    assert found is not None
    return round(found.ms, 6), found.n_before


@pytest.mark.parametrize(
    ("lengths", "asked", "ms"),
    [
        ([30, 31, 32], 2, 100 + 3 * 5 + 30 + 31 + 32),  # one step holds them all
        ([30, 31, 32], 0, 100 + 3 * 5 + 30 + 31 + 32),  # and the first waits for its company
        ([30, 31, 32, 33, 34], 4, 2 * 100 + 5 * 5 + 30 + 31 + 32 + 33 + 34),
        ([14_000], 0, 100 + 5 + 14_000),  # a miss has its step to itself, and it is one
        ([30, 14_000], 0, 100 + 5 + 30),  # which the other does not share
    ],
)
def test_a_forecast_counts_the_steps_of_several_requests(lengths: list[int], asked: int, ms: float) -> None:
    """100 tokens a step. It had counted 140 steps for one request of 14,000 tokens, and nothing for those that ride along."""
    waiting = [job(n_tokens) for n_tokens in lengths]
    assert forecast(policy_of(*waiting), waiting[asked]) == (ms, asked)


def test_one_request_a_step_has_a_step_for_each() -> None:
    """The paper's engine: nobody rides along."""
    waiting = [job(n_tokens) for n_tokens in (30, 31, 32)]
    assert forecast(policy_of(*waiting, step=StepSize()), waiting[1]) == (2 * 105 + 30 + 31, 1)


def test_a_forecast_counts_two_steps_where_a_request_waits_for_anothers_prefix() -> None:
    """50 tokens and 5 more of another that shares them would fit one step, but the second finds them cached after it."""
    first, second = sharing(50, 55)
    assert forecast(policy_of(first, second), second) == (2 * 105 + 50 + 5, 1)


def test_of_those_that_share_a_prefix_the_first_in_the_order_is_forecast_to_compute_it() -> None:
    """The leader, which came first, has 400 tokens of its own and runs last: the other had been forecast 5 tokens of 55."""
    leader, other, later = sharing(450, 55, 57)
    policy = policy_of(leader, other, later)
    assert forecast(policy, other) == (105 + 55, 0)
    assert forecast(policy, later) == (2 * 105 + 55 + 7, 1)
    policy.remove(other)
    assert forecast(policy, later) == (105 + 57, 0)
    assert forecast(policy, leader) == (2 * 100 + 2 * 5 + 57 + 400, 1)


def sharing(*lengths: int) -> list[Job]:
    """Jobs that wait for one prefix of 50 tokens, as calibration marks them."""
    leader, *others = jobs = [job(n_tokens, next_page="shared") for n_tokens in lengths]
    leader.n_sharers = len(others)
    for one in jobs:
        one.n_shared_tokens = 50
        one.is_follower = one is not leader
    return jobs


def test_who_is_refused_delays_nobody() -> None:
    """Three that cannot be in time, two of them because their time has passed, stand before one that can."""
    late = [job(300, 0.0, deadline_ms=1000.0) for _ in range(2)]
    hopeless, possible = job(310, 10.0, deadline_ms=200.0), job(320, 10.0, deadline_ms=500.0)
    decision = policy_of(*late, hopeless, possible).decide(10.0)
    assert [refusal.status for refusal in decision.refuse.values()] == [504, 504, 429]
    assert decision.run == [possible]


def test_a_forecast_of_many_is_the_sum_of_what_lies_before() -> None:
    """1,000 requests in blocks that have split and shrunk, against a plain sum; one a step."""
    waiting = [job(10 + 7 * n % 400, 0.001 * n) for n in range(1000)]
    policy = policy_of(*waiting, step=StepSize())
    for gone in waiting[::3]:
        policy.remove(gone)
    order = list(policy.in_order(0.0))
    for place in (0, 1, 333, 500, len(order) - 1):
        expected = sum(MACHINE(one.n_input_tokens, 0) for one in order[: place + 1])
        assert forecast(policy, order[place]) == (expected, place)


def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction_and_a_passed_one_with_its_wait() -> None:
    """300 tokens take 405 ms from now, and it came 50 ms ago; another waits until its time is over."""
    unreachable, reachable = job(300, 9.95, deadline_ms=454.0), job(300, 9.95, deadline_ms=2000.0)
    policy = policy_of(unreachable)
    refused = policy.decide(10.0).refuse[unreachable]
    assert refused.status == HTTPStatus.TOO_MANY_REQUESTS
    assert "deadline_ms is 454, and this request is predicted to finish 455 ms after its arrival" in refused.message
    policy.add(reachable)
    assert policy.decide(10.0) == ([reachable], {})
    expired = policy.decide(12.0)
    assert expired.run == []
    assert expired.refuse[reachable].status == HTTPStatus.GATEWAY_TIMEOUT
    assert "after 2050 ms in the queue" in expired.refuse[reachable].message


def test_a_deadline_shorter_than_the_work_is_refused_with_the_prediction_although_it_has_passed() -> None:
    """1 ms of 405: it is over before the first look at the queue."""
    hopeless = job(300, 9.99, deadline_ms=1.0)
    refusal = policy_of(hopeless).decide(10.0).refuse[hopeless]
    assert refusal.status == HTTPStatus.TOO_MANY_REQUESTS
    assert "predicted to finish 415 ms after its arrival" in refusal.message


def test_without_a_model_of_milliseconds_nobody_is_refused_on_arrival() -> None:
    """`--set jct_model=cache-miss`: 504 only."""
    hopeless = job(100_000, 10.0, deadline_ms=1.0)
    assert srjf(hopeless).decide(10.0).refuse == {}
    assert list(srjf(hopeless).decide(10.1).refuse) == [hopeless]
