"""The radix cache without KV memory: durable slots are only counted. For replays on a simulated clock (`planner.simulate`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_advisor import KVAdvisor
from sgl_prefill.core.kv_plan import KVPlan, plan_kv
from sgl_prefill.core.prefix_tree import TreeListener
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache


class SimulatedCache:
    """Does what the engine does with its prefix cache around a step. A token of a job may stand for a page."""

    def __init__(self, n_slots: int) -> None:
        self._slots = _SlotCounter(n_slots)
        self._cache = WatchedRadixCache(
            CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self._slots, page_size=1)
        )
        self.tree = RadixTree(self._cache)
        self._locked: list[Any] = []  # nodes whose prefix the jobs of the step reuse

    def connect(self, listener: TreeListener, advisor: KVAdvisor) -> None:
        self._cache.connect(listener, advisor)

    def begin(self, jobs: list[Job]) -> list[KVPlan]:
        """Locks the cached prefixes of a step's jobs, plans how much of their KV is kept, and evicts for that. Call it while
        the jobs still wait."""
        assert self._cache.advisor is not None
        plans: list[KVPlan] = []
        n_promised = 0
        cached: list[int] = []
        for job in jobs:
            match = self._cache.match_prefix(MatchPrefixParams(key=_key(job, job.most_cached_tokens)))
            cached.append(match.device_prefix_len)
            self._cache.inc_lock_ref(match.last_device_node)
            self._locked.append(match.last_device_node)
        for job, n_cached in zip(jobs, cached, strict=True):
            n_free = self._slots.n_free - n_promised
            n_reused = max(n_cached, job.n_led_tokens)
            room = self._cache.advisor.room_for(job, n_reused, job.n_input_tokens - n_reused, n_free)
            leader = None if job.leader is None else plans[jobs.index(job.leader)]
            plan = plan_kv(job.n_input_tokens, n_cached, room, leader=leader, n_led=job.n_led_tokens)
            n_promised += plan.n_new_durable
            plans.append(plan)
        self._cache.evict_tokens(n_promised - self._slots.n_free)
        self._slots.n_free -= n_promised
        return plans

    def end(self, jobs: list[Job], plans: list[KVPlan]) -> None:
        """Inserts the kept KV of a step into the tree."""
        for job, plan in zip(jobs, plans, strict=True):
            value = torch.zeros(plan.n_durable, dtype=torch.int64)
            result = self._cache.insert(InsertParams(key=_key(job, plan.n_durable), value=value))
            self._slots.n_free += max(result.prefix_len - plan.n_reused, 0)  # duplicates of cached tokens are freed
        for node in self._locked:
            self._cache.dec_lock_ref(node)
        self._locked.clear()


class _SlotCounter:
    """Stands in for the KV allocator."""

    device = "cpu"

    def __init__(self, n_slots: int) -> None:
        self.n_free = n_slots

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        self.n_free += len(slots)


def _key(job: Job, n_tokens: int) -> RadixKey:
    return RadixKey(job.tokens[:n_tokens], job.namespace)
