"""One request per step, shortest calibrated job first, inside SGLang's own prefill admission.

SGLang builds a prefill batch by walking `scheduler.waiting_queue`. For the length of that call the queue holds only the
request that the policy picked, so SGLang matches, locks and allocates for that one alone, and the prefix cache sees no
access by requests that merely wait. Afterwards the others are put back in their order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.jct import Drift, FittedJct, JctModel, cache_miss_tokens
from sgl_prefill.errors import SeamError
from sgl_prefill.scheduling import reply_facts
from sgl_prefill.scheduling.arrival import arrival_s
from sgl_prefill.scheduling.calibrated_queue import CalibratedQueue
from sgl_prefill.scheduling.metrics import PolicyMetrics
from sgl_prefill.scheduling.waiting_list import WaitingList
from sgl_prefill.scheduling.watched_cache import WatchedRadixCache
from sgl_prefill.seam import record

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler


# The flag's credit is in tokens, whatever the model: at what a token of a cold prompt of this length costs.
TYPICAL_TOKENS = 1000


class Policy:
    """The calibrated queue, SGLang's list of waiting requests that it follows, and what the JCT model says of the running one."""

    def __init__(
        self, queue: CalibratedQueue, jct_ms: FittedJct | None = None, metrics: PolicyMetrics | None = None
    ) -> None:
        self.queue = queue
        self.metrics = metrics
        self.last_step_s = 0.0  # what the policy itself took of it
        self.jct_ms = jct_ms  # None: the model in use knows no milliseconds
        self.drift = Drift()
        self.n_pending_tokens = 0
        self._running: dict[Req, float] = {}  # predicted ms without drift

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
            self.n_pending_tokens += order.waiting(req).n_input_tokens
        if not isinstance(waiting, WaitingList):
            waiting = WaitingList(waiting)
            waiting.take_changes()
        return waiting

    def predict(self, req: Req) -> None:
        """A request is about to run: tell its client how long the model says that it takes."""
        if self.jct_ms is not None:
            waiting = self.queue.order.waiting(req)
            self._running[req] = self.jct_ms(waiting.n_input_tokens, waiting.n_cached_tokens)
            reply_facts.add(req.time_stats, predicted_jct_ms=round(self._running[req] * self.drift.factor, 3))

    def observe(self, req: Req) -> None:
        """A request has run."""
        predicted_ms, stats = self._running.pop(req, None), req.time_stats
        if stats.prefill_finished_time == 0:  # it failed
            return
        if predicted_ms is not None:
            actual_ms = 1000 * (stats.prefill_finished_time - stats.forward_entry_time)
            if self.metrics is not None:
                self.metrics.prediction(predicted_ms * self.drift.factor, actual_ms)
            self.drift.observe(predicted_ms, actual_ms)
        if self.metrics is not None:
            wait_s = stats.forward_entry_time - arrival_s(req)
            self.metrics.request(wait_s, reply_facts.read(stats), req.cached_tokens)

    def end_step(self) -> None:
        """All of a step has been done."""
        self.last_step_s = self.queue.cost.take_s()
        if self.metrics is not None:
            order = self.queue.order
            oldest = order.oldest()
            oldest_wait_s = 0.0 if oldest is None else time.perf_counter() - order.waiting(oldest).arrival_s
            self.metrics.step(len(order), oldest_wait_s, self.last_step_s)

    def leave(self, req: Req) -> None:
        self.n_pending_tokens -= self.queue.order.waiting(req).n_input_tokens
        self.queue.remove(req)


def after_init_schedule_policy(result: None, scheduler: Scheduler) -> None:
    """Hook: build the policy once the prefix cache exists. Raises SeamError where the probe cannot read that cache."""
    if not isinstance(scheduler.tree_cache, WatchedRadixCache):
        raise SeamError(
            f"this model's prefix cache is SGLang's {type(scheduler.tree_cache).__name__}, and calibrated-srjf reads"
            " RadixCache only (with sliding-window models --disable-hybrid-swa-memory may help):"
            " start with --scheduling stock"
        )
    cache = scheduler.tree_cache
    sign = (1 if scheduler.schedule_low_priority_values_first else -1) if scheduler.enable_priority_scheduling else 0
    config = record.config()
    jct_ms: FittedJct | None = None
    jct: JctModel = cache_miss_tokens
    fairness_lambda = config.fairness_lambda
    if config.jct_model == "fitted":
        jct = jct_ms = scheduler.tp_worker.model_runner.sgl_prefill_jct
        fairness_lambda *= jct_ms(TYPICAL_TOKENS, 0) / TYPICAL_TOKENS
    queue = CalibratedQueue(cache, jct, fairness_lambda, config.max_queue_s, sign)
    collector = getattr(scheduler, "metrics_collector", None)
    scheduler.sgl_prefill_policy = Policy(queue, jct_ms, PolicyMetrics(collector.labels) if collector else None)
    scheduler.waiting_queue = WaitingList(scheduler.waiting_queue)


def around_get_new_batch_prefill(
    original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """Hook: let SGLang admit the picked request alone."""
    policy: Policy = scheduler.sgl_prefill_policy
    with policy.queue.cost:
        waiting = policy.follow(scheduler.waiting_queue)
        picked = policy.queue.order.first(time.perf_counter())
    if picked is None:
        scheduler.waiting_queue = waiting
        return original(scheduler, running_batch)
    scheduler.waiting_queue = [picked]
    try:
        plan = original(scheduler, running_batch)
    finally:
        left = scheduler.waiting_queue
        if not any(req is picked for req in left):
            with policy.queue.cost:
                waiting.take_out(picked)
                policy.predict(picked)
                policy.leave(picked)
        # SGLang itself may queue requests during the call: a grammar that became ready, a preempted generation.
        for req in left:
            if req is not picked:
                waiting.append(req)
        scheduler.waiting_queue = waiting
    stats: Any = plan.batch_to_run.prefill_stats if plan.batch_to_run is not None else None
    if stats is not None:
        stats.num_pending_tokens = policy.n_pending_tokens
    return plan


def after_process_batch_result(result: None, scheduler: Scheduler, batch: ScheduleBatch, *_: Any) -> None:
    """Hook: correct the JCT model by what the requests of this step have taken, and count."""
    policy: Policy = scheduler.sgl_prefill_policy
    if batch.forward_mode.is_extend():
        for req in batch.reqs:
            policy.observe(req)
        policy.end_step()
