"""A subclass of SGLang's radix cache. It reports each change of its tree, evicts prefixes of background jobs first and prefixes
of waiting jobs last, caches only the durable part of a request, and has public prefixes, which all tenants share.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sgl_prefill.core.background_kv import BackgroundKV
from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_advisor import KVAdvisor
from sgl_prefill.core.kv_plan import KVPlan
from sgl_prefill.core.prefix_tree import Match, TreeListener
from sgl_prefill.port.kv import namespaces
from sgl_prefill.port.kv.namespaces import Namespace
from sgl_prefill.port.steps import custom_params, request_state
from sgl_prefill.startup.techniques import PREFIX_CACHE_NAME

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SharingKey(RadixKey):  # type: ignore[misc]
    """The key of a tenant's prompt that begins with a public prefix. No node spans both parts.

    [0, n_public)    looked up without a namespace
    [n_public, n)    looked up in the tenant's namespace
    """

    __slots__ = ("n_public", "namespace")

    def __init__(self, tokens: array[int], namespace: str | None, n_public: int) -> None:
        super().__init__(tokens, None if n_public else namespace)  # SGLang compares the namespace of the first token
        self.namespace, self.n_public = namespace, n_public

    def __getitem__(self, index: int | slice) -> RadixKey:
        plain = super().__getitem__(index)
        start = index if isinstance(index, int) else index.indices(len(self))[0]
        n_public = min(max(self.n_public - start, 0), len(plain))
        return SharingKey(plain.token_ids, self.namespace, n_public)


class WatchedRadixCache(RadixCache):  # type: ignore[misc]
    """All changes of the tree's shape go through `reset`, `_split_node`, `_insert` and `_delete_leaf`."""

    listener: TreeListener | None = None
    advisor: KVAdvisor | None = None
    of_background: BackgroundKV | None = None
    eviction_strategy: Any
    n_removed_tokens = 0  # by eviction, since the start
    _inserts_for_background = False
    _public: tuple[array[int], ...] = ()  # public prefixes
    _pinned: frozenset[int] = frozenset()  # indices of the public prefixes that are cached and locked

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._durable_ends: dict[int, int] = {}  # by row of the slot table, of requests that were lent scratch

    def connect(self, listener: TreeListener, advisor: KVAdvisor, kv_tokens: int = 0) -> None:
        """Sets the listener of changes and the advisor on evictions. kv_tokens: slots of the cache, of which background jobs get
        a share; 0 without such jobs."""
        self.listener, self.advisor = listener, advisor
        self.of_background = BackgroundKV(kv_tokens)
        self.eviction_strategy = _UnwantedFirst(advisor, self.of_background, self.eviction_strategy)

    def evict_tokens(self, n_tokens: int, *, for_background: bool = False) -> None:
        """Evicts at least `n_tokens`. For background jobs: of any KV as much as they may take, then of their own."""
        if n_tokens <= 0:
            return
        if for_background and self.of_background is not None:
            n_of_any = min(n_tokens, self.of_background.n_tokens_more)
            n_tokens -= n_of_any
            self.evict_tokens(n_of_any)
            with self.eviction_strategy.backgrounds_first():
                self.evict_tokens(n_tokens)
            return
        self.evict(EvictParams(num_tokens=n_tokens))

    def share(self, tokens: array[int]) -> None:
        """Makes a prefix public. It stays in the cache once it has been computed."""
        if tokens not in self._public:
            self._public = (*self._public, tokens)

    def count_public_tokens(self, tokens: array[int], namespace: str | None) -> int:
        """Length of the prompt's public prefix, in whole pages."""
        if not self._public or not isinstance(namespace, Namespace):
            return 0
        longest = max(_count_equal(tokens, public) for public in self._public)
        return longest // int(self.page_size) * int(self.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return super().match_prefix(dataclasses.replace(params, key=self._sharing(params.key)))

    def insert(self, params: InsertParams) -> InsertResult:
        return super().insert(dataclasses.replace(params, key=self._sharing(params.key)))

    def _sharing(self, key: RadixKey) -> RadixKey:
        n_public = self.count_public_tokens(key.token_ids, key.extra_key)
        return key if n_public == 0 else SharingKey(key.raw_token_ids(), key.extra_key, min(n_public, len(key)))

    def reset(self) -> None:
        super().reset()
        self._pinned = frozenset()
        if self.of_background is not None:
            self.of_background.cleared()
        if self.listener is not None:
            self.listener.cleared()

    def evictable_background_tokens(self) -> int:
        """Evictable tokens that only background jobs have used."""
        return 0 if self.of_background is None else self.of_background.evictable_tokens(_evictable_tokens)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if self.of_background is not None:
            self.of_background.split(upper, child, split_len)
        if self.listener is not None:
            self.listener.split(upper, child)
        return upper

    def _insert_helper(self, node: TreeNode, key: RadixKey, value: Any, *rest: Any) -> tuple[int, TreeNode]:
        n_public = key.n_public if isinstance(key, SharingKey) else 0
        if n_public == 0:
            return self._insert(node, key, value, *rest)
        n_present, last = self._insert(node, key[:n_public], value[:n_public], *rest)
        for place, public in enumerate(self._public):
            if place not in self._pinned and n_public >= len(public) // self.page_size * self.page_size > 0:
                self._pin(place)
        if n_public == len(key):
            return n_present, last
        n_found, last = self._insert(node, key, value, *rest)
        return (n_found if n_present == n_public else n_present), last

    def _pin(self, place: int) -> None:
        """Locks a public prefix that is in the cache."""
        tokens = self._public[place]
        found = super().match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        if found.device_prefix_len == len(tokens) // self.page_size * self.page_size:
            self.inc_lock_ref(found.last_device_node)
            self._pinned |= {place}

    def _insert(self, node: TreeNode, key: RadixKey, value: Any, *rest: Any) -> tuple[int, TreeNode]:
        n_present, last = super()._insert_helper(node, key, value, *rest)
        is_new = n_present < len(key)
        if self.of_background is not None:
            if not self._inserts_for_background:
                self.of_background.used_by_live(_path_to(last))
            elif is_new:
                self.of_background.added(last, len(last.key))
        if self.listener is not None and is_new:
            self.listener.child_added(last)
        return n_present, last

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.n_removed_tokens += len(node.key)
        if self.of_background is not None:
            self.of_background.removed(node)
        if self.listener is not None:
            self.listener.leaf_removed(node)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Of a follower, zeros behind what is cached: `admission` writes the slots of its leader there."""
        leader, n_cached = request_state.of(req).leader, req.kv.cache_protected_len
        if leader is None:
            found: torch.Tensor = super().prefix_device_indices(req)
            return found
        path = self.path_device_indices(req.last_node)[:n_cached]
        return torch.cat((path, path.new_zeros(req.prefix_len - n_cached)))

    def checkpoint(self, req: Req, *, up_to: int, **options: Any) -> None:
        """Inserts only the durable part of the request into the tree; of a follower, behind what its leader has inserted."""
        state = request_state.of(req)
        if state.is_published:
            return
        plan, leader = state.kv_plan, state.leader
        self._inserts_for_background = custom_params.is_background(req)
        if namespaces.is_public(req) and req.finished():
            self.share(req.origin_input_ids)
        if plan is not None and plan.n_scratch > 0:
            up_to = min(up_to, plan.n_durable)
        if plan is not None and leader is not None and request_state.of(leader).n_published < min(plan.n_led, up_to):
            return
        super().checkpoint(req, up_to=up_to, **options)
        state.n_published = up_to

    def lend_scratch(self, req: Req, plan: KVPlan) -> None:
        """Notes under which plan a request runs: behind its durable end its row names scratch."""
        state = request_state.of(req)
        state.kv_plan = plan
        if state.leader is not None:
            # The leader's slots are not this request's to free.
            req.kv.cache_protected_len = min(plan.n_led, plan.n_durable)
        if plan.n_scratch > 0:
            self._durable_ends[req.kv.req_pool_idx] = plan.n_durable

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Gives the allocator only durable slots back: scratch was lent."""
        n_durable = self._durable_ends.get(kv.req_pool_idx)
        if n_durable is not None:
            ranges = [(start, min(end, n_durable)) for start, end in ranges if start < n_durable]
        if ranges:
            super().free_kv_row(kv, ranges)

    def publish(self, req: Req) -> None:
        """Inserts the durable part of a launched request, and gives its other slots back (`port.launched`)."""
        n_owned = req.owned_kv_len()
        if not req.skip_radix_cache_insert:
            self.checkpoint(req, up_to=n_owned)
        self.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_allocated_len)])
        self.unlock(req.lock)
        req.lock = None
        self._end_plan(req)
        self._durable_ends[req.kv.req_pool_idx] = req.kv.cache_protected_len  # nothing more is this request's to free
        request_state.of(req).is_published = True

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self._end_plan(req)
        super().on_release(req, checkpointed=checkpointed)
        if req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)

    def supports_mamba(self) -> bool:
        """Where no prefix is cached: a request's state ends with it."""
        return bool(self.disable)

    def mamba_evictable_size(self) -> int:
        return 0

    def mamba_protected_size(self) -> int:
        return 0

    def _end_plan(self, req: Req) -> None:
        state = request_state.of(req)
        plan, state.kv_plan, state.leader = state.kv_plan, None, None
        self._durable_ends.pop(req.kv.req_pool_idx, None)
        if plan is not None and plan.n_scratch > 0:
            self.token_to_kv_pool_allocator.give_back_scratch(plan)


def _path_to(node: TreeNode) -> Iterator[TreeNode]:
    """Yields a node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


class _UnwantedFirst:
    """Eviction strategy around SGLang's: KV that only background jobs have used first, KV that waiting jobs will use last."""

    def __init__(self, advisor: KVAdvisor, of_background: BackgroundKV, strategy: Any) -> None:
        self._advisor, self._of_background, self._strategy = advisor, of_background, strategy
        self._backgrounds_first = False

    @contextmanager
    def backgrounds_first(self) -> Iterator[None]:
        """Within the block, KV of background jobs is evicted first even if waiting jobs will use it."""
        self._backgrounds_first = True
        try:
            yield
        finally:
            self._backgrounds_first = False

    def get_priority(self, node: TreeNode) -> tuple[bool, bool, bool, Any]:
        is_wanted, is_live = self._advisor.is_wanted(node), node not in self._of_background
        return self._backgrounds_first and is_live, is_wanted, is_live, self._strategy.get_priority(node)


class RadixTree:
    """`core.prefix_tree.PrefixTree` over SGLang's radix cache.

    Read-only, unlike `RadixCache.match_prefix`, which refreshes access times and splits nodes: calls for all waiting requests
    would decide what is evicted.
    """

    def __init__(self, cache: WatchedRadixCache) -> None:
        self._cache = cache

    @property
    def page_size(self) -> int:
        return int(self._cache.page_size)

    def match(self, job: Job, start: tuple[TreeNode, int] | None = None) -> Match:
        """Finds the same prefix as `match_prefix`; none where the cache is disabled."""
        cache, page_size = self._cache, self.page_size
        node, n_matched = start or (cache.root_node, 0)
        if cache.disable:
            return Match(node, 0, None, is_inside=False)
        n_tokens = len(job.tokens) // page_size * page_size
        n_public = cache.count_public_tokens(job.tokens, job.namespace)
        is_inside = False
        while n_matched < n_tokens:
            namespace = None if n_matched < n_public else job.namespace
            page = RadixKey(job.tokens[n_matched : n_matched + page_size], namespace).child_key(page_size)
            # `.get`, since `[]` of a defaultdict would add a child.
            child = None if is_inside else node.children.get(page)
            if child is None:
                return Match(node, n_matched, page, is_inside)
            # A match in the public prefix ends with it, even inside a node: the next token is in a tenant's namespace.
            most = n_public - n_matched if n_matched < n_public else len(child.key)
            n_equal = min(_count_equal(job.tokens, child.key.raw_token_ids(), n_matched), most)
            n_here = n_equal // page_size * page_size
            node, n_matched, is_inside = child, n_matched + n_here, n_here < len(child.key)
        return Match(node, n_matched, None, is_inside)

    def count_shared_tokens(self, one: Job, other: Job) -> int:
        if one.namespace != other.namespace:
            return min(self._cache.count_public_tokens(job.tokens, job.namespace) for job in (one, other))
        return _count_equal(one.tokens, other.tokens) // self.page_size * self.page_size

    def parent(self, node: TreeNode) -> TreeNode | None:
        return node.parent

    def key(self, node: TreeNode) -> Hashable:
        key: Hashable = node.key.child_key(self._cache.page_size)
        return key

    def end_tokens(self, node: TreeNode) -> int:
        return sum(len(above.key) for above in _path_to(node))

    def root(self) -> TreeNode:
        return self._cache.root_node

    def children(self, node: TreeNode) -> list[TreeNode]:
        return list(node.children.values())

    def n_tokens(self, node: TreeNode) -> int:
        return len(node.key)

    def n_hits(self, node: TreeNode) -> int:
        """Prefix hits: the first count of a node is the request that computed it."""
        return max(int(node.hit_count) - 1, 0)

    def first_tokens(self, node: TreeNode, n_tokens: int) -> array[int]:
        return node.key.token_ids[: min(n_tokens, len(node.key))]  # type: ignore[no-any-return]

    def evictable_tokens(self, node: TreeNode | None = None) -> int:
        if node is None:
            return int(self._cache.evictable_size())
        return _evictable_tokens(node)


def _evictable_tokens(node: TreeNode) -> int:
    return len(node.key) if node.lock_ref == 0 else 0


def _count_equal(one: array[int], other: array[int], start: int = 0) -> int:
    """Length of the common prefix of `one[start:]` and `other`. Copies neither: prompts are long."""
    n_tokens = min(len(one) - start, len(other))
    if n_tokens == 0:
        return 0
    differs = (
        np.frombuffer(one, one.typecode)[start : start + n_tokens] != np.frombuffer(other, other.typecode)[:n_tokens]
    )
    first = int(differs.argmax())
    return first if differs[first] else n_tokens


def register() -> None:
    """Registers the cache under the name that `--radix-cache-backend` gets. Idempotent. It serves with
    --disable-radix-cache too, where it must not free scratch either.
    """
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(PREFIX_CACHE_NAME) is None:
        register_radix_cache_backend(PREFIX_CACHE_NAME, lambda context: WatchedRadixCache(context.params))
