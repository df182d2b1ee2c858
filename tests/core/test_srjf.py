"""The policy on hand-computed cases (PrefillOnly, section 6 and Figure 5)."""

from __future__ import annotations

from sgl_prefill.core.jct import JctModel, cache_miss_tokens
from sgl_prefill.core.job import Job
from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policies.srjf import CalibratedSrjf, Srjf, cost_per_job
from sgl_prefill.core.policy import Policy, PolicySettings
from tests.core.jobs import calibrate, job, next_of, srjf

SHARED_TOKENS = 80
STEP_S = 0.05
# Figure 5: A < C < B < D; A and D share a prefix, B and C share another; the cache holds one request.
FIGURE_5 = (("A", "ad", 100), ("B", "bc", 140), ("C", "bc", 120), ("D", "ad", 160))


def figure_5(kind: type[Policy], fairness_lambda: float = 0.0, cost: JctModel = cache_miss_tokens) -> tuple[str, int]:
    """(order, cache hits) of one request per step with a cache that holds the last request alone."""
    policy = kind(PolicySettings(cost=cost, fairness_lambda=fairness_lambda))
    waiting = {
        job(n_tokens, 0.001 * number): (name, prefix) for number, (name, prefix, n_tokens) in enumerate(FIGURE_5)
    }
    for one in waiting:
        policy.add(one)
    order, n_hits, cached_prefix = "", 0, ""
    while (picked := next_of(policy)) is not None:
        policy.remove(picked)
        name, prefix = waiting.pop(picked)
        n_hits += prefix == cached_prefix
        order, cached_prefix = order + name, prefix
        for other, (_, its_prefix) in waiting.items():
            calibrate(policy, other, SHARED_TOKENS if its_prefix == cached_prefix else 0)
    return order, n_hits


def test_figure_5_first_in_first_out_hits_once() -> None:
    """Only C after B finds its prefix; a huge lambda is the same order."""
    assert figure_5(Fifo) == figure_5(CalibratedSrjf, fairness_lambda=1e9) == ("ABCD", 1)


def test_figure_5_plain_shortest_job_first_hits_once() -> None:
    """Without calibration C evicts what D could have used."""
    assert figure_5(Srjf) == ("ACBD", 1)


def test_figure_5_calibrated_shortest_job_first_hits_twice() -> None:
    """After A, D is the shortest: its prefix is in the cache now."""
    assert figure_5(CalibratedSrjf) == ("ADCB", 2)


def test_the_score_and_not_the_jct_is_compared() -> None:
    """Algorithm 1 as printed stores jct on line 11; then the last request below its score would win, here Z."""
    x, y, z = job(100, 0.0), job(90, 1.0), job(95, 1.0)
    # lambda 50: X scores 100 + 0, Y 90 + 50, Z 95 + 50, up to a constant.
    assert list(srjf(x, y, z, fairness_lambda=50.0).in_order(1.0)) == [x, y, z]


def test_a_long_request_waits_no_longer_than_its_length_over_lambda() -> None:
    """Against an endless stream of 10-token requests a 1,000-token one runs after (1,000 - 10) / lambda seconds."""
    assert steps_until_the_long_one(fairness_lambda=100.0, max_queue_s=None) * STEP_S == 9.9


def test_no_request_waits_longer_than_the_bound() -> None:
    """Without fairness the long one would starve; with a bound of 2 seconds it is next after 2 seconds."""
    assert steps_until_the_long_one(fairness_lambda=0.0, max_queue_s=2.0) * STEP_S == 2.0


def steps_until_the_long_one(fairness_lambda: float, max_queue_s: float | None) -> int:
    long = job(1000)
    policy = srjf(long, fairness_lambda=fairness_lambda, max_queue_s=max_queue_s)
    for n_steps in range(1000):
        now_s = n_steps * STEP_S
        policy.add(job(10, now_s))
        picked = next_of(policy, now_s)
        assert picked is not None
        if picked is long:
            return n_steps
        policy.remove(picked)
    raise AssertionError("the long request starves")


def test_a_clock_that_jumps_backwards_changes_no_order() -> None:
    """The order is by arrival; the clock is read only to see who is overdue."""
    early, late = job(100, 100.0), job(90, 101.0)
    policy = srjf(early, late, fairness_lambda=100.0, max_queue_s=5.0)
    assert next_of(policy, 102.0) is next_of(policy, -1e6) is early


def test_a_better_rank_goes_first_however_long_it_is() -> None:
    """User priorities come before predicted cost, and before arrival."""
    first, better = job(10), job(5000, 1.0, rank=-1)
    assert next_of(srjf(first, better)) is better
    fifo = Fifo(PolicySettings())
    for one in (first, better):
        fifo.add(one)
    assert next_of(fifo) is better


def test_a_prefix_that_serves_more_waiting_requests_is_worth_more() -> None:
    """100 tokens for one and 9 sharers with 10 each cost 19 a request; a lone 50 costs 50, and a hit of 15 less than both."""
    leader, lone, hit = job(100), job(50), job(100, cached=85)
    policy = srjf(leader, lone, hit, counts_sharers=True)
    assert list(policy.in_order(0.0)) == [hit, lone, leader]
    leader.n_sharers, leader.n_shared_tokens = 9, 90
    policy.recalibrated(leader)
    assert cost_per_job(cache_miss_tokens, leader) == 19
    assert list(policy.in_order(0.0)) == [hit, leader, lone]
    leader.n_sharers = 0
    policy.recalibrated(leader)
    assert list(policy.in_order(0.0)) == [hit, lone, leader]


def test_equal_requests_keep_their_order_and_an_empty_queue_gives_none() -> None:
    """Ties go to the first in the queue, also where the second was calibrated meanwhile."""
    first, second = job(10), job(10)
    policy = srjf(first, second)
    calibrate(policy, first, 5)
    calibrate(policy, first, 0)
    assert list(policy.in_order(0.0)) == [first, second]
    assert next_of(srjf()) is None


def test_who_waited_for_one_prefix_together_keeps_its_place_once_that_is_computed() -> None:
    """A younger one of the group is not put behind an older request of another prefix; its own arrival still bounds its wait."""
    old, other, young = job(100, 1.0, cached=95), job(100, 2.0, cached=90), job(100, 4.0, cached=95)

    def policy_of(*, counts_sharers: bool) -> CalibratedSrjf:
        return srjf(old, other, young, fairness_lambda=10.0, max_queue_s=5.0, counts_sharers=counts_sharers)

    def computed(policy: CalibratedSrjf, *jobs: Job) -> None:
        policy.prefix_computed(jobs)
        for one in jobs:
            policy.recalibrated(one)

    alone = policy_of(counts_sharers=False)
    computed(alone, old, young)
    assert list(alone.in_order(4.0)) == [old, other, young]
    policy = policy_of(counts_sharers=True)
    assert list(policy.in_order(4.0)) == [old, other, young]
    computed(policy, old, young)
    assert list(policy.in_order(4.0)) == [old, young, other]
    policy.remove(old)
    computed(policy, young)
    assert list(policy.in_order(4.0)) == [young, other]
    assert next_of(policy, 7.5) is other


def test_a_job_that_was_refused_is_not_taken_in_again_by_its_calibration() -> None:
    """The tree may change between a refusal and the moment when the caller takes the job out."""
    gone: Job = job(10, deadline_ms=5.0)
    policy = srjf(gone)
    assert list(policy.decide(1.0).refuse) == [gone]
    calibrate(policy, gone, 5)
    assert policy.decide(1.0).run == []
    policy.remove(gone)
