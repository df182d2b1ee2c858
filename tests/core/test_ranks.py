"""What ranks agree on, and a rank that decides nothing."""

from __future__ import annotations

from sgl_prefill.core.policies.follower import Broadcast, Follower
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import Decision, PolicySettings
from sgl_prefill.core.ranks import ALONE, smallest
from tests.core.jobs import job


def test_a_follower_says_what_it_is_told_whatever_its_own_clock_and_order() -> None:
    short, long, late = job(10, 0.0), job(1000, 0.0), job(20, 0.0, deadline_ms=1.0)
    leader = CalibratedSrjf(PolicySettings())
    for one in (short, long, late):
        leader.add(one)
    decided = leader.decide(5.0)
    assert decided.run == [short]
    assert list(decided.refuse) == [late]
    broadcasts = [Broadcast(Decision([long], decided.refuse), 0.25)]
    follower = Follower(PolicySettings(), broadcasts.pop)
    for one in (short, long, late):
        follower.add(one)
    assert follower.decide(-1e9) == Decision([long], decided.refuse)
    assert list(follower.waiting) == [short, long]
    assert follower.output_share == 0.25


def test_a_follower_receives_a_decision_only_while_jobs_wait() -> None:
    """Rank 0 broadcasts nothing else, and the other ranks would block for ever."""

    def receive() -> Broadcast:
        raise AssertionError("rank 0 broadcasts nothing")

    follower = Follower(PolicySettings(), receive)
    assert follower.decide(0.0) == Decision([], {})


def test_the_smallest_of_each_number_is_what_all_can_serve() -> None:
    class Two:
        index, count = 0, 2

        def of_first(self, value: object) -> object:
            return value

        def of_all(self, value: list[int]) -> list[list[int]]:
            return [value, [3, 100]]

    assert smallest(Two(), [5, 7]) == [3, 7]  # type: ignore[arg-type]
    assert smallest(ALONE, [5, 7]) == [5, 7]
