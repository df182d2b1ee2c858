"""What the scheduler asks of our policy in each step, over SGLang's requests: follow the queue, pick, predict, observe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sgl_prefill.core.jct import Drift, FittedJct, Work
from sgl_prefill.scheduling import reply_facts
from sgl_prefill.scheduling.arrival import arrival_s
from sgl_prefill.scheduling.calibrated_queue import CalibratedQueue
from sgl_prefill.scheduling.deadlines import Deadlines, Refusal, deadline_ms_of
from sgl_prefill.scheduling.metrics import PolicyMetrics
from sgl_prefill.scheduling.waiting_list import WaitingList

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class StepSize(NamedTuple):
    """How much runs in one step."""

    max_tokens: int = 0  # computed tokens of a step of several requests; 0: one request a step
    max_requests: int = 1


class Policy:
    """The calibrated queue, SGLang's list of waiting requests that it follows, and what the JCT model says of the running."""

    def __init__(
        self,
        queue: CalibratedQueue,
        jct_ms: FittedJct | None,
        metrics: PolicyMetrics | None,
        step_size: StepSize,
    ) -> None:
        self.queue = queue
        self.metrics = metrics
        self.step_size = step_size
        self.last_step_s = 0.0  # what the policy itself took of it
        self.jct_ms = jct_ms  # None: the model in use knows no milliseconds
        self.drift = Drift()
        self.n_pending_tokens = 0
        self._deadlines = Deadlines()
        self._arrived: list[Req] = []
        self._running: Work | None = None  # the step as the model sees it

    def follow(self, waiting: list[Req]) -> WaitingList[Req]:
        """Bring the queue up to date with SGLang's list, whatever SGLang did to it; the list to go on with."""
        order = self.queue.order
        appended = waiting.take_changes() if isinstance(waiting, WaitingList) else None
        if appended is None:
            present = set(waiting)
            for req in [req for req in order if req not in present]:
                self.leave(req)
            appended = [req for req in waiting if req not in order]
        for req in appended:
            self.queue.add(req)
            self._deadlines.add(req)
            self.n_pending_tokens += order.waiting(req).n_input_tokens
        self._arrived += appended
        if not isinstance(waiting, WaitingList):
            waiting = WaitingList(waiting)
            waiting.take_changes()
        return waiting

    def take_refused(self, now_s: float) -> dict[Req, Refusal]:
        """Requests that shall not be computed: those whose time has passed, and new ones that would come too late."""
        refused = {}
        for req in self._deadlines.take_expired(now_s):
            deadline_ms = deadline_ms_of(req)
            assert deadline_ms is not None
            refused[req] = Refusal.expired(deadline_ms, 1000 * (now_s - arrival_s(req)))
        for req in self._arrived:
            deadline_ms = deadline_ms_of(req)
            if deadline_ms is None or req in refused or self.jct_ms is None:
                continue
            work, n_before = self.queue.work_until_done(req, self.jct_ms, *self.step_size)
            finish_ms = 1000 * (now_s - arrival_s(req)) + self.drift.ms(work)
            if finish_ms > deadline_ms:
                refused[req] = Refusal.unreachable(deadline_ms, finish_ms, n_before)
        self._arrived.clear()
        for req in refused:
            self.leave(req)
        return refused

    def pick(self, now_s: float) -> list[Req]:
        """The requests of the next step, the best first; they stay in the queue."""
        picked = self.queue.pick(now_s, *self.step_size)
        if self.metrics is not None and picked:
            self.metrics.starvation(self.queue.order.starvation_s(picked, now_s))
        return picked

    def start(self, reqs: Sequence[Req], now_s: float) -> None:
        """These are about to run together: tell their clients how long the model says that it takes."""
        if self.jct_ms is not None and reqs:
            waiting = [self.queue.order.waiting(req) for req in reqs]
            self._running = self.jct_ms.of_step([(one.n_input_tokens, one.n_cached_tokens) for one in waiting])
            shown_ms = round(self.drift.ms(self._running), 3)
            for req in reqs:
                reply_facts.add(req.time_stats, predicted_jct_ms=shown_ms)
        for req in reqs:
            if self.metrics is not None:
                self.metrics.wait(now_s - arrival_s(req))
            self.leave(req)

    def observe(self, reqs: Sequence[Req]) -> None:
        """These have run, and were the whole step."""
        work, self._running = self._running, None
        done = [req for req in reqs if req.time_stats.prefill_finished_time > 0]  # the others failed
        if done and work is not None:
            finished_s = max(req.time_stats.prefill_finished_time for req in done)
            actual_ms = 1000 * (finished_s - done[0].time_stats.forward_entry_time)
            if self.metrics is not None:
                self.metrics.prediction(self.drift.ms(work), actual_ms)
            self.drift.observe(work, actual_ms)
        if self.metrics is not None:
            for req in done:
                self.metrics.request(reply_facts.read(req.time_stats), req.cached_tokens)

    def end_step(self) -> None:
        """All of a step has been done."""
        if self.metrics is not None:
            with self.queue.cost:
                self.metrics.queue(self.queue.order, time.perf_counter())
        self.last_step_s = self.queue.cost.take_s()
        if self.metrics is not None:
            self.metrics.overhead(self.last_step_s)

    def leave(self, req: Req) -> None:
        """A request waits no longer."""
        self.n_pending_tokens -= self.queue.order.waiting(req).n_input_tokens
        self.queue.remove(req)
        self._deadlines.discard(req)
