"""The policy with its prefix-cache calibration, JCT predictor and metrics, in a running engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import Work
from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_advisor import KVAdvisor
from sgl_prefill.core.policy import Decision, Policy, ScoreParts, Writing
from sgl_prefill.core.prefix_tree import PrefixTree, TreeListener
from sgl_prefill.port.steps.metrics import Facts, PolicyMetrics


class CostMeter:
    """Sums the time of the policy: a context manager around each of its parts, which must not nest."""

    def __init__(self) -> None:
        self._spent_s = self._entered_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spent_s += time.perf_counter() - self._entered_s

    def take_s(self) -> float:
        """Returns the seconds that were measured since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class RunningStep(NamedTuple):
    number: int  # of the decision
    predicted_ms: float | None  # None without a predictor
    score: ScoreParts | None  # of the first job; None for policies without scores
    work: Work | None  # for the JCT model


class LiveScheduling:
    """One per scheduler process."""

    def __init__(self, tree: PrefixTree, policy: Policy, metrics: PolicyMetrics | None = None) -> None:
        self.policy = policy
        self.cost = CostMeter()
        self.calibration = Calibration(tree, policy, self.cost)
        self.predictor = policy.settings.predictor
        self.n_steps = 0  # decided so far
        self.last_step_s = 0.0  # time of the policy in the last step
        self._score: ScoreParts | None = None  # of the first job of the last decision
        self.n_pending_tokens = 0  # input tokens of all waiting requests
        self._metrics = metrics
        self._started: RunningStep | None = None  # the step that was started last, until it is taken
        self._shows_waiting = False  # the gauges say that requests wait

    @property
    def listener(self) -> TreeListener:
        """For the prefix cache, which reports its changes to it."""
        return _Metered(self.calibration, self.cost)

    @property
    def advisor(self) -> KVAdvisor:
        return self.calibration.advisor

    def arrive(self, job: Job) -> None:
        self.calibration.add(job)
        self.n_pending_tokens += job.n_input_tokens

    def leave(self, job: Job) -> None:
        """Removes a job that runs, was cancelled or refused."""
        self.calibration.remove(job)
        self.n_pending_tokens -= job.n_input_tokens

    def decide(self, now_s: float, writing: Sequence[Writing] = ()) -> Decision:
        """Chooses the next step and removes refused jobs. writing: jobs that are decoding."""
        self.policy.writing = writing
        decision = self.policy.decide(now_s)
        for job in decision.refuse:
            self.leave(job)
        if decision.run:
            self.n_steps += 1
            self._score = self.policy.parts_of_score(decision.run[0], now_s)
        if self._metrics is not None:
            if decision.run:
                self._metrics.set_starvation(self.policy, decision.run, now_s)
            elif self._shows_waiting:
                self.show_queue(now_s)
        return decision

    def start(self, jobs: Sequence[Job], now_s: float) -> float | None:
        """Removes the jobs of a step that is about to run. Returns the predicted milliseconds; None without a predictor."""
        predicted_ms = work = None
        if self.predictor is not None and jobs:
            work = self.predictor.model.of_step([(job.n_priced_tokens, job.n_reused_tokens) for job in jobs])
            predicted_ms = self.predictor.ms(work)
        if jobs:
            self._started = RunningStep(self.n_steps, predicted_ms, self._score, work)
        self.policy.started(jobs)
        for job in jobs:
            if self._metrics is not None:
                self._metrics.observe_wait(now_s - job.arrival_s)
            self.leave(job)
        return predicted_ms

    def show_queue(self, now_s: float) -> None:
        """Updates the queue's gauges: after steps, and where the queue empties by refusals or cancellations alone."""
        if self._metrics is not None:
            self._metrics.set_queue(self.policy, now_s)
            self._shows_waiting = bool(self.policy.waiting)

    def take_started(self) -> RunningStep:
        """Returns the step that was started last, once."""
        step, self._started = self._started, None
        return step or RunningStep(self.n_steps, None, None, None)

    def observe(self, step: RunningStep, actual_ms: float | None, facts: Sequence[Facts]) -> None:
        """Corrects the predictor and counts the requests of a step that has ended.

        actual_ms: of its forward pass, None where it failed. facts: of the answered requests.
        """
        if self.predictor is not None and step.work is not None and actual_ms is not None:
            if self._metrics is not None:
                self._metrics.observe_prediction(self.predictor.ms(step.work), actual_ms)
            self.predictor.observe(step.work, actual_ms)
        if self._metrics is not None:
            for of_request in facts:
                self._metrics.count_request(of_request)
            with self.cost:
                self.show_queue(time.perf_counter())
        self.last_step_s = self.cost.take_s()
        if self._metrics is not None:
            self._metrics.observe_policy_time(self.last_step_s)


class _Metered:
    """Counts a tree listener's time as the policy's."""

    def __init__(self, listener: TreeListener, cost: CostMeter) -> None:
        self._listener, self._cost = listener, cost

    def child_added(self, child: Any) -> None:
        with self._cost:
            self._listener.child_added(child)

    def split(self, upper: Any, lower: Any) -> None:
        with self._cost:
            self._listener.split(upper, lower)

    def leaf_removed(self, leaf: Any) -> None:
        with self._cost:
            self._listener.leaf_removed(leaf)

    def cleared(self) -> None:
        with self._cost:
            self._listener.cleared()
