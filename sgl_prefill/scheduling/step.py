"""The policy's choice, inside SGLang's own prefill admission.

SGLang builds a prefill batch by walking `scheduler.waiting_queue`. For the length of that call the queue holds only what the
policy picked, so SGLang matches, locks and allocates for that alone, and the prefix cache sees no access by requests that
merely wait. Afterwards the others are put back in their order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.jct import FittedJct, JctModel, cache_miss_tokens
from sgl_prefill.errors import SeamError
from sgl_prefill.scheduling import deadlines
from sgl_prefill.scheduling.calibrated_queue import CalibratedQueue
from sgl_prefill.scheduling.metrics import PolicyMetrics
from sgl_prefill.scheduling.policy import Policy, StepSize
from sgl_prefill.scheduling.waiting_list import WaitingList
from sgl_prefill.scheduling.watched_cache import WatchedRadixCache
from sgl_prefill.seam import record

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler


# The flag's credit is in tokens, whatever the model: at what a token of a cold prompt of this length costs.
TYPICAL_TOKENS = 1000


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
    counts_sharers = config.sharers == "count"
    queue = CalibratedQueue(cache, jct, fairness_lambda, config.max_queue_s, sign, counts_sharers=counts_sharers)
    collector = getattr(scheduler, "metrics_collector", None)
    metrics = PolicyMetrics(collector.labels) if collector else None
    scheduler.sgl_prefill_policy = Policy(queue, jct_ms, metrics, _step_size(scheduler))
    scheduler.waiting_queue = WaitingList(scheduler.waiting_queue)


def _step_size(scheduler: Scheduler) -> StepSize:
    pack_tokens = record.config().pack_step_tokens
    if pack_tokens == 0:
        return StepSize()
    from sglang.srt.runtime_context import get_schedule

    if pack_tokens is None:
        pack_tokens = scheduler.tp_worker.model_runner.sgl_prefill_jct.full_price_tokens()
    # SGLang's own limit of a step of several requests is the memory that has been set aside for it.
    most = scheduler.max_prefill_tokens
    max_requests = get_schedule().prefill_max_requests or scheduler.max_running_requests
    step_size = StepSize(most if pack_tokens is None else min(pack_tokens, most), max_requests)
    record.add(step_size=step_size._asdict())
    return step_size


def around_get_new_batch_prefill(
    original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """Hook: let SGLang admit what the policy picked, and nothing else."""
    policy: Policy = scheduler.sgl_prefill_policy
    now_s = time.perf_counter()
    with policy.queue.cost:
        waiting = policy.follow(scheduler.waiting_queue)
        refused = policy.take_refused(now_s)
        waiting.take_out(refused)
        picked = policy.pick(now_s)
    for req, refusal in refused.items():
        deadlines.refuse(scheduler, req, refusal)
    if not picked:
        scheduler.waiting_queue = waiting
        return original(scheduler, running_batch)
    scheduler.waiting_queue = list(picked)
    try:
        plan = original(scheduler, running_batch)
    finally:
        left = dict.fromkeys(scheduler.waiting_queue)
        with policy.queue.cost:
            started = [req for req in picked if req not in left]
            waiting.take_out(started)
            policy.start(started, now_s)
        # SGLang itself may queue requests during the call: a grammar that became ready, a preempted generation.
        for req in left:
            if req not in picked:
                waiting.append(req)
        scheduler.waiting_queue = waiting
    stats: Any = plan.batch_to_run.prefill_stats if plan.batch_to_run is not None else None
    if stats is not None:
        stats.num_pending_tokens = policy.n_pending_tokens
    return plan


def after_process_batch_result(result: None, scheduler: Scheduler, batch: ScheduleBatch, *_: Any) -> None:
    """Hook: correct the JCT model by what this step has taken, and count."""
    policy: Policy = scheduler.sgl_prefill_policy
    if batch.forward_mode.is_extend():
        policy.observe(batch.reqs)
        policy.end_step()
