"""SGLang's radix cache, to which only the durable part of a request is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_prefill.core.kv_plan import KVPlan
from sgl_prefill.scheduling.watched_cache import WatchedRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


class SuffixKVRadixCache(WatchedRadixCache):
    """A scratch slot never reaches the tree: what a request leaves behind is cut at its plan's durable end."""

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        plan = plan_of(req)
        if plan is None or plan.n_scratch == 0:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        super().cache_finished_req(req, is_insert, kv_len_to_handle=min(kv_len_to_handle, plan.n_durable))
        self.token_to_kv_pool_allocator.give_back_scratch(plan)
        req.sgl_prefill_kv_plan = None

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        plan = plan_of(req)
        assert plan is None or plan.n_scratch == 0, "a request that goes on keeps all of its KV"
        super().cache_unfinished_req(req, chunked)


def create(context: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory for SGLang's registry of radix caches. A disabled cache keeps nothing, but it too must not free scratch."""
    return SuffixKVRadixCache(context.params)


def plan_of(req: Req) -> KVPlan | None:
    """The KV plan that a request runs under, None before its forward pass and after it."""
    return getattr(req, "sgl_prefill_kv_plan", None)
