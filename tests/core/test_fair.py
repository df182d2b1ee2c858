"""Fair shares between clients, on a simulated clock."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core import shares
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


def fair(*jobs: Job, advance: float | None = None, **settings: Any) -> Fair:
    """advance: of each client."""
    policy = Fair(PolicySettings(**settings))
    for one in jobs:
        policy.add(one)
    if advance is not None:
        for of_rank in policy._classes.values():
            of_rank.shares.least_advance = advance
    return policy


@pytest.fixture
def only_the_least_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients get no more than that, whatever their jobs cost."""
    monkeypatch.setattr(shares, "ADVANCE_JOBS", 0.0)


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
    """Whatever they ask for, by at most an advance and a job, counted from when they began together."""
    policy = fair(step=step)
    jobs = {f"c{number}": [job(n, client=f"c{number}") for n in theirs] for number, theirs in enumerate(lengths)}
    for one in itertools.chain.from_iterable(jobs.values()):
        policy.add(one)
    for of_rank in policy._classes.values():
        of_rank.shares.least_advance = bound
    served: dict[str, int] = defaultdict(int)
    n_waiting = {client: len(theirs) for client, theirs in jobs.items()}
    largest = max((one.n_input_tokens for theirs in jobs.values() for one in theirs), default=0)
    limit = max(bound, shares.ADVANCE_JOBS * largest) + largest
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


def test_one_long_request_is_not_behind_a_flood() -> None:
    """Of b against 1,000 short ones of a: it runs once a is a full step ahead."""
    policy = fair(step=StepSize(100, 10))
    flood = [job(10, client="a") for _ in range(1000)]
    for one in flood:
        policy.add(one)
    for _ in range(20):
        assert clients_of(run_step(policy)) == "a" * 10
    late = job(500, arrival_s=1.0, client="b")
    policy.add(late)
    assert [clients_of(run_step(policy)) for _ in range(4)] == ["a" * 10, "a", "b", "a" * 10]


def test_one_short_request_goes_before_a_flood() -> None:
    """Although hits of a, whose profile was expensive, are shorter, and a may go far ahead; once served, b is one of two."""
    profile, *hits = [job(1000, client="a") for _ in range(100)]
    policy = fair(profile, *hits, step=StepSize(100, 10))
    assert clients_of(run_step(policy)) == "a"
    for one in hits:
        calibrate(policy, one, 990)
    assert clients_of(run_step(policy)) == "a" * 10
    for n_tokens in (12, 11):
        policy.add(job(n_tokens, arrival_s=1.0, client="b"))
    assert clients_of(run_step(policy))[0] == "b"
    assert clients_of(run_step(policy)) == "a" * 10


def test_a_stream_of_newcomers_takes_no_more_than_their_share(only_the_least_advance: None) -> None:
    """Each new client goes first, as long as those who wait have had their share: of each step that is one part in as many as
    wait, and not what newcomers leave."""
    policy = fair(*(job(10, client="a") for _ in range(200)), advance=10.0)
    served, share = "", 0.0
    for number in range(200):
        policy.add(job(10, client=f"b{number}"))
        share += 1 / len({one.client for one in policy.waiting})
        served += clients_of(run_step(policy))[0]
    assert served.count("b") > 150, "newcomers were served"
    assert served.count("a") >= share - 3


def test_a_profile_that_was_computed_is_used_before_others_come() -> None:
    """20 users of 10 posts behind a profile each, and a cache for one: as many tokens are computed as without shares."""
    users = [(f"u{number}", 10) for number in range(20)]
    assert steps_of(users, is_fair=True) == steps_of(users, is_fair=False)


def steps_of(users: list[tuple[str, int]], *, is_fair: bool) -> int:
    """How many tokens it takes to serve these, if the profile of one user at a time is cached."""
    settings = PolicySettings(counts_sharers=True)
    policy: Policy = Fair(settings) if is_fair else CalibratedSrjf(settings)
    jobs = [job(1400 + n, client=user) for user, n_jobs in users for n in range(n_jobs)]
    for one in jobs:
        policy.add(one)
    n_computed, cached_of = 0, ""
    while policy.waiting:
        (one,) = run_step(policy)
        n_computed += one.n_miss_tokens
        if one.client != cached_of:
            for other in policy.waiting:
                if other.client in (one.client, cached_of):
                    calibrate(policy, other, 1390 if other.client == one.client else 0)
            cached_of = one.client
    return n_computed


def test_a_hit_is_charged_at_what_it_costs(only_the_least_advance: None) -> None:
    """Of two clients with prompts of 100 tokens, the one whose prompts are cached but for 10 runs ten for one."""
    cached = [job(100, client="a") for _ in range(30)]
    fresh = [job(100, client="b") for _ in range(3)]
    policy = fair(*cached, *fresh, advance=0.0)
    for one in cached:
        calibrate(policy, one, 90)
    order = "".join(clients_of(run_step(policy)) for _ in range(33))
    assert order[:11] in ("a" + "b" + "a" * 9, "a" * 10 + "b")
    assert [order[:n].count("b") for n in (11, 22)] == [1, 2]


def test_nobody_saves_up_a_share_by_staying_away(only_the_least_advance: None) -> None:
    """After a has run alone for long, b gets one half and not all."""
    policy = fair(*(job(10, client="a") for _ in range(50)), advance=0.0)
    for _ in range(20):
        run_step(policy)
    for _ in range(20):
        policy.add(job(10, client="b"))
    assert sorted(clients_of([*itertools.chain.from_iterable(run_step(policy) for _ in range(10))])) == [*"aaaaabbbbb"]


def test_priorities_come_before_shares() -> None:
    first, second, urgent = job(10, client="a"), job(10, client="b"), job(10, client="a", rank=-1.0)
    policy = fair(first, second, urgent, advance=0.0)
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
    counters = Shares(5.0)
    for client in map(str, range(1000)):
        counters.begin(client)
        counters.charge(client, 3.0)
        counters.end(client)
    assert len(counters._served) <= 1
    assert len(counters._largest) <= 1


def test_a_forecast_counts_what_others_get_meanwhile(only_the_least_advance: None) -> None:
    """Behind 100 ms of its own and beside a client with 1,000 ms, a job is done after about 200 ms and the advance."""
    model = FittedJct(0.0, 1.0, 0.0, 0.0)
    settings = PolicySettings(cost=model, predictor=Predictor(model))
    policy = Fair(settings)
    jobs = {client: [job(50, client=client) for _ in range(n)] for client, n in (("a", 2), ("b", 20), ("c", 1))}
    for one in itertools.chain.from_iterable(jobs.values()):
        policy.add(one)
    (of_rank,) = policy._classes.values()
    of_rank.shares.least_advance = 30.0
    found = policy.forecast(jobs["a"][1])
    assert found is not None
    assert found.ms == pytest.approx(100 + (100 + 30) + 50, rel=0.01)
