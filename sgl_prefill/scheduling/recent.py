"""The last steps and requests, recorded as they end, for the dashboard and `GET /scheduler/decisions`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_prefill.core.policy import ScoreParts

N_STEPS = 1000
N_REQUESTS = 2000


def text(name: str) -> str:
    """A client's text as JSON can hold it: at most 200 characters, lone surrogates escaped."""
    return name[:200].encode("utf-8", "backslashreplace").decode()


class Answered(NamedTuple):
    """One request that has run."""

    rid: str
    end_s: float
    client: str
    n_input_tokens: int
    n_cached_tokens: int
    wait_s: float
    latency_s: float


class Step(NamedTuple):
    """One forward pass that has ended."""

    number: int  # of the decision
    end_s: float  # on the scheduler's clock, as are all times here
    predicted_ms: float | None  # before it ran; None without a predictor
    forward_ms: float
    policy_ms: float  # time of the policy, before and after the pass
    between_ms: float  # since the end of the step before; 0 if no request waited then
    score: ScoreParts | None  # of the first request; None for policies without scores
    requests: Sequence[Answered]  # the first is the policy's choice, the others share its step

    @property
    def n_computed_tokens(self) -> int:
        return sum(one.n_input_tokens - one.n_cached_tokens for one in self.requests)

    def shown(self, unix_minus_clock_s: float) -> dict[str, Any]:
        """The line of `GET /scheduler/decisions`."""
        line: dict[str, Any] = {
            "step": self.number,
            "ended_unix_s": round(self.end_s + unix_minus_clock_s, 3),
            "predicted_ms": self.predicted_ms,
            "actual_ms": round(self.forward_ms, 3),
        }
        if self.score is not None:
            line |= {"cost": float(self.score.cost), "credit": float(self.score.credit)}
        return line | {
            "requests": [
                {
                    "id": one.rid,
                    "client": one.client,
                    "waited_ms": round(1000 * one.wait_s, 3),
                    "input_tokens": one.n_input_tokens,
                    "cached_tokens": one.n_cached_tokens,
                }
                for one in self.requests
            ]
        }


class Totals(NamedTuple):
    """Since the start, as SGLang's `/metrics` count it."""

    steps: int = 0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0


class Recent:
    """One per scheduler process; adding takes some microseconds a request."""

    def __init__(self) -> None:
        self.steps: collections.deque[Step] = collections.deque(maxlen=N_STEPS)
        self.requests: collections.deque[Answered] = collections.deque(maxlen=N_REQUESTS)
        self.totals = Totals()
        self._was_waited_for = False

    def add(
        self,
        *,
        number: int,
        begin_s: float,
        end_s: float,
        predicted_ms: float | None,
        policy_s: float,
        score: ScoreParts | None,
        is_waited_for: bool,
        requests: Sequence[Answered],
    ) -> None:
        """Records a step. is_waited_for: requests wait as it ends, so that the time until the next step is overhead."""
        before_s = self.steps[-1].end_s if self.steps else begin_s
        self.steps.append(
            Step(
                number,
                end_s,
                predicted_ms,
                1000 * (end_s - begin_s),
                1000 * policy_s,
                1000 * max(begin_s - before_s, 0.0) if self._was_waited_for else 0.0,
                score,
                requests,
            )
        )
        self.requests.extend(requests)
        self._was_waited_for = is_waited_for

    def count(self, requests: Sequence[Answered], kept_evicted: Sequence[tuple[int, int]]) -> None:
        """Adds to the totals; kept_evicted: of the requests with a KV plan."""
        totals = self.totals
        self.totals = Totals(
            totals.steps + 1,
            totals.requests + len(requests),
            totals.input_tokens + sum(one.n_input_tokens for one in requests),
            totals.cached_tokens + sum(one.n_cached_tokens for one in requests),
            totals.kept_tokens + sum(kept for kept, _ in kept_evicted),
            totals.evicted_tokens + sum(evicted for _, evicted in kept_evicted),
        )
