"""Jobs for tests of policies."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

from sgl_prefill.core.job import Job
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import Policy, PolicySettings

_numbers = itertools.count()


def job(n_tokens: int, arrival_s: float = 0.0, cached: int = 0, **fields: Any) -> Job:
    """Of tokens that no other job has."""
    first = next(_numbers) << 32
    made = Job(array("q", range(first, first + n_tokens)), arrival_s, n_tokens - 1, **fields)
    made.n_cached_tokens = cached
    return made


def srjf(*jobs: Job, **settings: Any) -> CalibratedSrjf:
    """A policy under which these wait; cache-miss tokens unless told otherwise."""
    policy = CalibratedSrjf(PolicySettings(**settings))
    for one in jobs:
        policy.add(one)
    return policy


def next_of(policy: Policy, now_s: float = 0.0) -> Job | None:
    """The best job of the next step."""
    return next(iter(policy.decide(now_s).run), None)


def calibrate(policy: Policy, one: Job, cached: int) -> None:
    """What the prefix cache holds of a waiting job is now this."""
    one.n_cached_tokens = cached
    policy.recalibrated(one)
