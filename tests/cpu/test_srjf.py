"""The policy on hand-computed cases (PrefillOnly, section 6 and Figure 5)."""

from __future__ import annotations

from typing import NamedTuple

from sgl_prefill.core.jct import JctModel, cache_miss_tokens
from sgl_prefill.core.srjf import SrjfQueue, Waiting, cost_per_request


class Job(NamedTuple):
    name: str
    n_tokens: int
    prefix: str
    arrival_s: float = 0.0
    rank: float = 0.0


SHARED_TOKENS = 80
STEP_S = 0.05
# Figure 5: A < C < B < D; A and D share a prefix, B and C share another; the cache holds one request.
FIGURE_5 = [
    Job("A", 100, "ad", 0.000),
    Job("B", 140, "bc", 0.001),
    Job("C", 120, "bc", 0.002),
    Job("D", 160, "ad", 0.003),
]


def run(jobs: list[Job], jct: JctModel, fairness_lambda: float = 0.0) -> tuple[str, int]:
    """(order, cache hits) of one request per step with a cache that holds the last request alone."""
    queue: SrjfQueue[Job] = SrjfQueue(jct, fairness_lambda)
    order, n_hits, cached_prefix = "", 0, ""
    for job in jobs:
        queue.put(job, Waiting(job.n_tokens, 0, job.arrival_s, job.rank))
    while (picked := queue.first(0.0)) is not None:
        queue.remove(picked)
        n_hits += picked.prefix == cached_prefix
        order, cached_prefix = order + picked.name, picked.prefix
        for other in queue:
            queue.calibrate(other, SHARED_TOKENS if other.prefix == cached_prefix else 0)
    return order, n_hits


def uncalibrated(n_input_tokens: int, n_cached_tokens: int) -> float:
    return float(n_input_tokens)


def test_figure_5_first_in_first_out_hits_once() -> None:
    """With a huge lambda the order is that of arrival, and only C after B finds its prefix."""
    assert run(FIGURE_5, cache_miss_tokens, fairness_lambda=1e9) == ("ABCD", 1)


def test_figure_5_plain_shortest_job_first_hits_once() -> None:
    """Without calibration C evicts what D could have used."""
    assert run(FIGURE_5, uncalibrated) == ("ACBD", 1)


def test_figure_5_calibrated_shortest_job_first_hits_twice() -> None:
    """After A, D is the shortest: its prefix is in the cache now."""
    assert run(FIGURE_5, cache_miss_tokens) == ("ADCB", 2)


def test_the_score_and_not_the_jct_is_compared() -> None:
    """Algorithm 1 as printed stores jct on line 11; then the last request below its score would win, here Z."""
    jobs = [Job("X", 100, "x", 0.0), Job("Y", 90, "y", 1.0), Job("Z", 95, "z", 1.0)]
    # lambda 50: X scores 100 + 0, Y 90 + 50, Z 95 + 50, up to a constant.
    assert run(jobs, cache_miss_tokens, fairness_lambda=50.0)[0] == "XYZ"


def test_a_long_request_waits_no_longer_than_its_length_over_lambda() -> None:
    """Against an endless stream of 10-token requests a 1,000-token one runs after (1,000 - 10) / lambda seconds."""
    assert steps_until_the_long_one(fairness_lambda=100.0, max_queue_s=None) * STEP_S == 9.9


def test_no_request_waits_longer_than_the_bound() -> None:
    """Without fairness the long one would starve; with a bound of 2 seconds it is next after 2 seconds."""
    assert steps_until_the_long_one(fairness_lambda=0.0, max_queue_s=2.0) * STEP_S == 2.0


def steps_until_the_long_one(fairness_lambda: float, max_queue_s: float | None) -> int:
    long, queue = Job("L", 1000, "long", 0.0), SrjfQueue[Job](cache_miss_tokens, fairness_lambda, max_queue_s)
    queue.put(long, Waiting(long.n_tokens, 0, long.arrival_s))
    for n_steps in range(1000):
        now_s = n_steps * STEP_S
        queue.put(Job("s", 10, f"p{n_steps}", now_s), Waiting(10, 0, now_s))
        picked = queue.first(now_s)
        assert picked is not None
        if picked is long:
            return n_steps
        queue.remove(picked)
    raise AssertionError("the long request starves")


def test_a_clock_that_jumps_backwards_changes_no_order() -> None:
    """The order is by arrival; the clock is read only to see who is overdue."""
    queue: SrjfQueue[str] = SrjfQueue(cache_miss_tokens, 100.0, max_queue_s=5.0)
    queue.put("early", Waiting(100, 0, 100.0))
    queue.put("late", Waiting(90, 0, 101.0))
    assert queue.first(102.0) == queue.first(-1e6) == "early"


def test_a_better_rank_goes_first_however_long_it_is() -> None:
    """User priorities come before predicted cost."""
    jobs = [Job("A", 10, "a", rank=0), Job("B", 5000, "b", rank=-1)]
    assert run(jobs, cache_miss_tokens)[0] == "BA"


def test_a_prefix_that_serves_more_waiting_requests_is_worth_more() -> None:
    """100 tokens for one and 9 sharers with 10 each cost 19 a request; a lone 50 costs 50, and a hit of 15 less than both."""
    queue: SrjfQueue[str] = SrjfQueue(cache_miss_tokens, 0.0)
    queue.put("leader", Waiting(100, 0, 0.0))
    queue.put("lone", Waiting(50, 0, 0.0))
    queue.put("hit", Waiting(100, 85, 0.0))
    assert list(queue.in_order(0.0)) == ["hit", "lone", "leader"]
    queue.calibrate("leader", 0, n_sharers=9, n_shared_tokens=90)
    assert cost_per_request(cache_miss_tokens, queue.waiting("leader")) == 19
    assert list(queue.in_order(0.0)) == ["hit", "leader", "lone"]
    queue.calibrate("leader", 0)
    assert list(queue.in_order(0.0)) == ["hit", "lone", "leader"]


def test_equal_requests_keep_their_order_and_an_empty_queue_gives_none() -> None:
    """Ties go to the first in the queue."""
    assert run([Job("A", 10, "a"), Job("B", 10, "b")], cache_miss_tokens)[0] == "AB"
    assert SrjfQueue[Job](cache_miss_tokens, 1.0).first(0.0) is None


def test_who_waited_for_one_prefix_together_keeps_its_place_once_that_is_computed() -> None:
    """A younger one of the group is not put behind an older request of another prefix; its own arrival still bounds its wait."""
    queue: SrjfQueue[str] = SrjfQueue(cache_miss_tokens, fairness_lambda=10.0, max_queue_s=5.0)
    queue.put("old", Waiting(100, 95, 1.0))
    queue.put("other", Waiting(100, 90, 2.0))
    queue.put("young", Waiting(100, 95, 4.0))
    assert list(queue.in_order(4.0)) == ["old", "other", "young"]
    queue.credit_together(["old", "young"])
    assert list(queue.in_order(4.0)) == ["old", "young", "other"]
    queue.remove("old")
    queue.credit_together(["young"])
    assert list(queue.in_order(4.0)) == ["young", "other"]
    assert queue.first(7.5) == "other"


def test_nobody_starves_who_rides_along() -> None:
    """The oldest has waited 9 s: passed over where it is not among those taken, however the best of them came."""
    queue: SrjfQueue[str] = SrjfQueue(cache_miss_tokens, fairness_lambda=0.0)
    for name, n_tokens, arrival_s in (("old", 500, 1.0), ("new", 10, 5.0), ("newer", 20, 6.0)):
        queue.put(name, Waiting(n_tokens, 0, arrival_s))
    assert queue.starvation_s(["new", "newer"], now_s=10.0) == 9.0
    assert queue.starvation_s(["new", "old"], now_s=10.0) == 0.0
