"""The last steps and requests, recorded as they end, for the dashboard and `GET /scheduler/decisions`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_prefill.core.policy import ScoreParts
from sgl_prefill.port.steps.step_state import Answered, EndedStep, StepListener
from sgl_prefill.port.steps.time_stats import facts_of

N_STEPS = 1000
N_REQUESTS = 2000


def text(name: str) -> str:
    """Makes a client's text safe for JSON: at most 200 characters, lone surrogates escaped."""
    return name[:200].encode("utf-8", "backslashreplace").decode()


class Step(NamedTuple):
    number: int  # of the decision
    end_s: float  # `time.perf_counter` of the scheduler, as all times here
    predicted_ms: float | None  # before the step ran; None without a predictor
    forward_ms: float
    policy_ms: float  # time of the policy, before and after the pass
    between_ms: float  # since the end of the step before; 0 if no request waited then
    score: ScoreParts | None  # of the first request; None for policies without scores
    requests: Sequence[Answered]  # the first is the policy's choice, the others share its step

    @property
    def n_computed_tokens(self) -> int:
        return sum(one.n_input_tokens - one.n_cached_tokens for one in self.requests)

    def shown(self, unix_minus_clock_s: float) -> dict[str, Any]:
        """Returns a line of `GET /scheduler/decisions`."""
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
    """Counts since the start, as in SGLang's `/metrics`."""

    steps: int = 0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    kept_tokens: int = 0
    evicted_tokens: int = 0


class Recent(StepListener):
    """One per scheduler process. A request costs a few microseconds."""

    def __init__(self) -> None:
        self.steps: collections.deque[Step] = collections.deque(maxlen=N_STEPS)
        self.requests: collections.deque[Answered] = collections.deque(maxlen=N_REQUESTS)
        self.totals = Totals()
        self._was_waited_for = False

    def on_step_end(self, step: EndedStep) -> None:
        before_s = self.steps[-1].end_s if self.steps else step.begin_s
        self.steps.append(
            Step(
                step.number,
                step.end_s,
                step.predicted_ms,
                1000 * (step.end_s - step.begin_s),
                1000 * step.policy_s,
                1000 * max(step.begin_s - before_s, 0.0) if self._was_waited_for else 0.0,
                step.score,
                step.answered,
            )
        )
        self.requests.extend(step.answered)
        self._was_waited_for = step.is_waited_for
        totals, facts = self.totals, [facts_of(req.time_stats) for req in step.reqs]
        self.totals = Totals(
            totals.steps + 1,
            totals.requests + len(step.answered),
            totals.input_tokens + sum(one.n_input_tokens for one in step.answered),
            totals.cached_tokens + sum(one.n_cached_tokens for one in step.answered),
            totals.kept_tokens + sum(one.get("kept_tokens", 0) for one in facts),
            totals.evicted_tokens + sum(one.get("evicted_tokens", 0) for one in facts),
        )
