"""One request per step, shortest calibrated job first, inside SGLang's own prefill admission.

SGLang builds a prefill batch by walking `scheduler.waiting_queue`. For the length of that call the queue holds only the
request that the policy picked, so SGLang matches, locks and allocates for that one alone, and the prefix cache sees no
access by requests that merely wait. Afterwards the others are put back in their order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_prefill.core.jct import cache_miss_tokens
from sgl_prefill.core.srjf import Waiting, pick_shortest
from sgl_prefill.errors import SeamError
from sgl_prefill.kv.prefix_cache import SuffixKVRadixCache
from sgl_prefill.scheduling.arrival import arrival_s
from sgl_prefill.scheduling.radix_probe import count_cached_tokens
from sgl_prefill.seam import record

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler


class CalibratedSrjf:
    """The core policy over SGLang's waiting requests and radix tree."""

    def __init__(self, scheduler: Scheduler, fairness_lambda: float) -> None:
        self._cache = scheduler.tree_cache
        self._fairness_lambda = fairness_lambda
        self._priority_sign = 1 if scheduler.schedule_low_priority_values_first else -1
        self._priorities_on = scheduler.enable_priority_scheduling

    def describe(self, req: Req) -> Waiting:
        """`n_cached_tokens` is what SGLang would reuse: it always computes the last token, and more for logprobs."""
        token_ids = req.origin_input_ids
        if req.output_ids:  # a preempted generation; the sum copies the whole prompt
            token_ids = token_ids + req.output_ids
        n_input = len(token_ids)
        n_matched = count_cached_tokens(self._cache, token_ids, req.extra_key)
        return Waiting(
            n_input_tokens=n_input,
            n_cached_tokens=min(n_matched, req._compute_max_prefix_len(n_input)),
            arrival_s=arrival_s(req),
            rank=req.priority * self._priority_sign if self._priorities_on else 0,
        )

    def pick(self, waiting: list[Req]) -> Req | None:
        return pick_shortest(waiting, self.describe, jct=cache_miss_tokens, fairness_lambda=self._fairness_lambda)


def after_init_schedule_policy(result: None, scheduler: Scheduler) -> None:
    """Hook: build the policy once the prefix cache exists. Raises SeamError where the probe cannot read that cache."""
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    if type(scheduler.tree_cache) not in (RadixCache, ChunkCache, SuffixKVRadixCache):
        raise SeamError(
            f"this model's prefix cache is SGLang's {type(scheduler.tree_cache).__name__}, and calibrated-srjf reads"
            " RadixCache only (with sliding-window models --disable-hybrid-swa-memory may help):"
            " start with --scheduling stock"
        )
    scheduler.sgl_prefill_policy = CalibratedSrjf(scheduler, record.config().fairness_lambda)


def around_get_new_batch_prefill(
    original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """Hook: let SGLang admit the picked request alone."""
    if len(scheduler.waiting_queue) < 2:
        return original(scheduler, running_batch)
    arrived = scheduler.waiting_queue
    picked = scheduler.sgl_prefill_policy.pick(arrived)
    scheduler.waiting_queue = [picked]
    try:
        plan = original(scheduler, running_batch)
    finally:
        left = scheduler.waiting_queue
        was_admitted = not any(req is picked for req in left)
        waiting = [req for req in arrived if not (was_admitted and req is picked)]
        # SGLang itself may queue requests during the call: a grammar that became ready, a preempted generation.
        scheduler.waiting_queue = waiting + [req for req in left if req is not picked]
    _count_the_others_as_pending(plan, waiting)
    return plan


def _count_the_others_as_pending(plan: NextBatchPlan, others: list[Req]) -> None:
    stats: Any = plan.batch_to_run.prefill_stats if plan.batch_to_run is not None else None
    if stats is not None:
        stats.num_pending_tokens += sum(req.seqlen for req in others)
