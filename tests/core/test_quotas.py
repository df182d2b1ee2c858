"""How much may wait, on a simulated clock."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.jct import FittedJct, Predictor
from sgl_prefill.core.job import Job
from sgl_prefill.core.policies.fair import Fair
from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policy import Policy, PolicySettings
from sgl_prefill.core.quotas import Limit, Quotas
from tests.core.jobs import job

# A millisecond a token, and nothing else.
CLOCK = Predictor(FittedJct(step_ms=0.0, miss_token_ms=1.0, pair_ms=0.0, cached_token_ms=0.0))


def fair(**limits: Limit) -> Fair:
    return Fair(PolicySettings(quotas=Quotas(**limits), predictor=CLOCK, cost=CLOCK.model))


def come(policy: Policy, *jobs: Job) -> list[str | None]:
    """Why each that comes, one after the other, is refused."""
    found = []
    for one in jobs:
        refusal = policy.refusal(one)
        found.append(None if refusal is None else refusal.reason)
        if refusal is None:
            policy.add(one)
    return found


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), max_size=60),
    st.tuples(*[st.one_of(st.none(), st.integers(1, 40))] * 4),
)
def test_never_more_waits_than_is_allowed_but_one_that_nobody_waits_beside(
    events: list[tuple[str, int, bool]], limits: tuple[Any, ...]
) -> None:
    """Whoever comes and runs, in any order: the limits hold of all, and of each client. Who is refused would have passed one."""
    of_all, of_client = Limit(*limits[:2]), Limit(*limits[2:])
    policy = fair(of_all=of_all, of_client=of_client)
    for client, n_tokens, runs in events:
        one = job(n_tokens, client=client)
        (reason,) = come(policy, one)
        held = {
            "queue_full": (of_all, list(policy.waiting)),
            "client_queue_full": (of_client, [other for other in policy.waiting if other.client == client]),
        }
        for name, (limit, waiting) in held.items():
            n_all = sum(other.n_input_tokens for other in waiting)
            if reason is None:
                assert len(waiting) == 1 or limit.requests is None or len(waiting) <= limit.requests
                assert len(waiting) == 1 or limit.tokens is None or n_all <= limit.tokens
            elif reason == name:
                assert waiting
                assert len(waiting) + 1 > (limit.requests or 99) or n_all + n_tokens > (limit.tokens or 9999)
        if runs:
            for other in policy.decide(0.0).run:
                policy.remove(other)
                policy.remove(other)  # as where it was refused before


def test_one_clients_flood_leaves_room_for_others() -> None:
    policy = fair(of_client=Limit(requests=2))
    flood = [job(5, client="a") for _ in range(3)]
    assert come(policy, *flood, job(5, client="b")) == [None, None, "client_queue_full", None]


def test_the_answer_says_the_number_the_limit_and_when_there_will_be_room() -> None:
    """10 requests of a second each, of which one must be done; of a client that shares the machine with another, two."""
    policy = fair(of_all=Limit(requests=10), of_client=Limit(tokens=5_000))
    come(policy, *(job(1000, client="ab"[n % 2]) for n in range(10)))
    refusal = policy.refusal(job(1, client="c"))
    assert refusal is not None
    assert refusal.status == HTTPStatus.TOO_MANY_REQUESTS
    assert refusal.retry_after_s == 1
    assert refusal.message.startswith("10 requests wait and --max-waiting is 10: send it again in 1 s")
    refusal = policy.refusal(job(1000, client="a"))
    assert refusal is not None
    assert refusal.retry_after_s == 2
    assert (
        "5000 tokens of this client wait, this request has 1000, and --max-client-waiting is 5000t" in refusal.message
    )


def test_a_policy_that_predicts_nothing_says_a_second() -> None:
    policy = Fifo(PolicySettings(quotas=Quotas(Limit(requests=1))))
    come(policy, job(10_000))
    refusal = policy.refusal(job(1))
    assert refusal is not None
    assert refusal.retry_after_s == 1
