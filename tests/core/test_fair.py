"""Fair shares between clients, on a simulated clock."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.jct import FittedJct, Predictor
from sgl_prefill.core.job import Job
from sgl_prefill.core.packing import StepSize
from sgl_prefill.core.policies.fair import Fair
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import Policy, PolicySettings
from sgl_prefill.core.shares import Shares
from tests.core.jobs import calibrate, job

ONE = StepSize()
PACKED = StepSize(max_tokens=30, max_requests=4)


def fair(*jobs: Job, bound: float | None = None, **settings: Any) -> Fair:
    policy = Fair(PolicySettings(**settings))
    for one in jobs:
        policy.add(one)
    if bound is not None:
        for of_rank in policy._classes.values():
            of_rank.shares.bound = bound
    return policy


def run_step(policy: Policy, now_s: float = 0.0) -> list[Job]:
    run = policy.decide(now_s).run
    policy.started(run)
    for one in run:
        policy.remove(one)
    return run


def clients_of(jobs: list[Job]) -> str:
    return "".join(str(one.client) for one in jobs)


@given(
    st.lists(st.lists(st.integers(1, 20), max_size=12), min_size=2, max_size=5),
    st.integers(0, 40),
    st.sampled_from([ONE, PACKED]),
)
def test_of_two_that_wait_none_gets_more_than_its_share_plus_a_bound(
    lengths: list[list[int]], bound: int, step: StepSize
) -> None:
    """Whatever they ask for: from any moment to any other in which both wait, by at most twice (bound + largest job)."""
    policy = fair(step=step)
    jobs = {f"c{number}": [job(n, client=f"c{number}") for n in theirs] for number, theirs in enumerate(lengths)}
    for one in itertools.chain.from_iterable(jobs.values()):
        policy.add(one)
    for of_rank in policy._classes.values():
        of_rank.shares.bound = bound
    served: dict[str, int] = defaultdict(int)
    n_waiting = {client: len(theirs) for client, theirs in jobs.items()}
    limit = bound + max((one.n_input_tokens for theirs in jobs.values() for one in theirs), default=0)
    n_steps = 0
    while policy.waiting:
        run = run_step(policy)
        assert run, "work conserving: who waits runs"
        n_steps += 1
        for one in run:
            both_wait = [other for other in n_waiting if n_waiting[other] and n_waiting[one.client]]
            served[one.client] += one.n_input_tokens
            n_waiting[one.client] -= 1
            # All began at once, so that what each was served since then is what the bound is about.
            assert all(served[one.client] - served[other] <= limit for other in both_wait)
    assert n_steps <= sum(map(len, lengths))


@given(st.lists(st.integers(1, 50), max_size=20), st.sampled_from([ONE, PACKED]), st.floats(0, 10))
def test_within_one_client_shortest_first_decides(lengths: list[int], step: StepSize, now_s: float) -> None:
    """One client alone, or nobody named: the same steps as without fairness."""
    settings = PolicySettings(step=step, fairness_lambda=3.0, max_queue_s=5.0)
    jobs = [job(n, arrival_s=0.5 * number) for number, n in enumerate(lengths)]
    alone, shared = CalibratedSrjf(settings), Fair(settings)
    for one in jobs:
        alone.add(one)
        shared.add(one)
    while alone.waiting:
        assert run_step(alone, now_s) == run_step(shared, now_s)
    assert not shared.waiting


def test_one_request_is_not_behind_a_flood() -> None:
    """A long one of b against 10,000 short ones of a: it runs once a is a full step ahead."""
    policy = fair(step=StepSize(100, 10))
    flood = [job(10, client="a") for _ in range(1000)]
    for one in flood:
        policy.add(one)
    for _ in range(20):
        assert clients_of(run_step(policy)) == "a" * 10
    late = job(500, arrival_s=1.0, client="b")
    policy.add(late)
    assert [clients_of(run_step(policy)) for _ in range(4)] == ["a" * 10, "a", "b", "a" * 10]


def test_a_hit_is_charged_at_what_it_costs() -> None:
    """Of two clients with prompts of 100 tokens, the one whose prompts are cached but for 10 runs ten for one."""
    cached = [job(100, client="a") for _ in range(30)]
    fresh = [job(100, client="b") for _ in range(3)]
    policy = fair(*cached, *fresh, bound=0.0)
    for one in cached:
        calibrate(policy, one, 90)
    order = "".join(clients_of(run_step(policy)) for _ in range(33))
    assert order[:11] in ("a" + "b" + "a" * 9, "a" * 10 + "b")
    assert [order[:n].count("b") for n in (11, 22)] == [1, 2]


def test_nobody_saves_up_a_share_by_staying_away() -> None:
    """After a has run alone for long, b gets one half and not all."""
    policy = fair(*(job(10, client="a") for _ in range(50)), bound=0.0)
    for _ in range(20):
        run_step(policy)
    for _ in range(20):
        policy.add(job(10, client="b"))
    assert sorted(clients_of([*itertools.chain.from_iterable(run_step(policy) for _ in range(10))])) == [*"aaaaabbbbb"]


def test_priorities_come_before_shares() -> None:
    first, second, urgent = job(10, client="a"), job(10, client="b"), job(10, client="a", rank=-1.0)
    policy = fair(first, second, urgent, bound=0.0)
    assert run_step(policy) == [urgent]


def test_what_was_refused_or_left_is_forgotten() -> None:
    one, other = job(10, client="a"), job(10, client="b")
    policy = fair(one, other)
    policy.remove(one)
    policy.remove(one)
    policy.recalibrated(one)
    assert run_step(policy) == [other]
    assert not policy.decide(0.0).run


def test_clients_that_have_gone_take_no_memory() -> None:
    shares = Shares(bound=5.0)
    for client in map(str, range(1000)):
        shares.begin(client)
        shares.charge(client, 3.0)
        shares.end(client)
    assert len(shares._served) <= 1


def test_a_forecast_counts_what_others_get_meanwhile() -> None:
    """Behind 100 ms of its own and beside a client with 1,000 ms, a job is done after about 200 ms and the bound."""
    model = FittedJct(0.0, 1.0, 0.0, 0.0)
    settings = PolicySettings(cost=model, predictor=Predictor(model))
    policy = Fair(settings)
    jobs = {client: [job(50, client=client) for _ in range(n)] for client, n in (("a", 2), ("b", 20), ("c", 1))}
    for one in itertools.chain.from_iterable(jobs.values()):
        policy.add(one)
    (of_rank,) = policy._classes.values()
    of_rank.shares.bound = 30.0
    found = policy.forecast(jobs["a"][1])
    assert found is not None
    assert found.ms == pytest.approx(100 + (100 + 30) + 50, rel=0.01)
