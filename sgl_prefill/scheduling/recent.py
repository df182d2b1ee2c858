"""What the last steps and requests came to, written down as they end; nothing is computed from it until somebody looks."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

N_STEPS = 200
N_REQUESTS = 2000


class Step(NamedTuple):
    """One forward pass that has ended."""

    end_s: float  # on the scheduler's clock, as are all times here
    predicted_ms: float | None  # before it ran; None where nobody knew
    forward_ms: float
    policy_ms: float  # what the policy took of it, before and after the pass
    between_ms: float  # from the end of the step before; 0 where nobody waited then
    n_requests: int
    n_computed_tokens: int


class Answered(NamedTuple):
    """One request that has run."""

    end_s: float
    client: str
    n_input_tokens: int
    n_cached_tokens: int
    wait_s: float
    latency_s: float


class Totals(NamedTuple):
    """Since the start, as SGLang's `/metrics` count it."""

    steps: int = 0
    requests: int = 0
    background_requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0


class Recent:
    """One a scheduler process; adding costs some microseconds a request."""

    def __init__(self) -> None:
        self.steps: collections.deque[Step] = collections.deque(maxlen=N_STEPS)
        self.requests: collections.deque[Answered] = collections.deque(maxlen=N_REQUESTS)
        self.totals = Totals()
        self._was_waited_for = False

    def add(
        self,
        *,
        begin_s: float,
        end_s: float,
        predicted_ms: float | None,
        policy_s: float,
        is_waited_for: bool,
        requests: Sequence[Answered],
    ) -> None:
        """Writes down a step. is_waited_for: others wait as it ends, so that what passes until the next is the engine's."""
        before_s = self.steps[-1].end_s if self.steps else begin_s
        self.steps.append(
            Step(
                end_s,
                predicted_ms,
                1000 * (end_s - begin_s),
                1000 * policy_s,
                1000 * max(begin_s - before_s, 0.0) if self._was_waited_for else 0.0,
                len(requests),
                sum(one.n_input_tokens - one.n_cached_tokens for one in requests),
            )
        )
        self.requests.extend(requests)
        self._was_waited_for = is_waited_for

    def count(self, requests: Sequence[Answered], kept_evicted: Sequence[tuple[int, int]], n_background: int) -> None:
        """Adds to the totals; kept_evicted: of those of whom it is known."""
        totals = self.totals
        self.totals = Totals(
            totals.steps + 1,
            totals.requests + len(requests),
            totals.background_requests + n_background,
            totals.input_tokens + sum(one.n_input_tokens for one in requests),
            totals.cached_tokens + sum(one.n_cached_tokens for one in requests),
            totals.kept_tokens + sum(kept for kept, _ in kept_evicted),
            totals.evicted_tokens + sum(evicted for _, evicted in kept_evicted),
        )
