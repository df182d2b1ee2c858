"""The core policy over SGLang's waiting requests, kept calibrated by what the radix tree reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.jct import JctModel
from sgl_prefill.core.kv_plan import available_beside_wanted
from sgl_prefill.core.match_index import MatchIndex
from sgl_prefill.core.srjf import SrjfQueue, Waiting
from sgl_prefill.scheduling.arrival import arrival_s
from sgl_prefill.scheduling.radix_probe import find_match
from sgl_prefill.scheduling.watched_cache import WatchedRadixCache, end_tokens

if TYPE_CHECKING:
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


class CostMeter:
    """Time that the policy takes from the engine; a context manager around each of its parts, which do not nest."""

    def __init__(self) -> None:
        self._spent_s = self._entered_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spent_s += time.perf_counter() - self._entered_s

    def take_s(self) -> float:
        """Seconds since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class CalibratedQueue:
    """Each waiting request is matched once, when it arrives, and then only where the tree changes below its match."""

    def __init__(
        self,
        cache: WatchedRadixCache,
        jct: JctModel,
        fairness_lambda: float,
        max_queue_s: float | None = None,
        priority_sign: int = 0,  # 1: low values first, -1: high values first, 0: priorities are off
    ) -> None:
        self._cache, self._priority_sign = cache, priority_sign
        self._matches: MatchIndex[Req] = MatchIndex()
        self.order: SrjfQueue[Req] = SrjfQueue(jct, fairness_lambda, max_queue_s)
        self.cost = CostMeter()
        cache.listener = self

    def add(self, req: Req) -> None:
        """A request begins to wait."""
        match = find_match(self._cache, _tokens(req), req.extra_key)
        self._matches.place(req, match)
        n_input = len(_tokens(req))
        self.order.put(
            req,
            Waiting(
                n_input_tokens=n_input,
                n_cached_tokens=_usable(req, n_input, match.n_tokens),
                arrival_s=arrival_s(req),
                rank=req.priority * self._priority_sign if self._priority_sign else 0,
            ),
        )

    def remove(self, req: Req) -> None:
        """A request runs, or has left."""
        self._matches.remove(req)
        self.order.remove(req)

    def available_slots(self, req: Req, n_cached: int, n_missing: int, n_free: int) -> int:
        """Durable slots for a request that is about to run: free ones, and cached ones that nobody waits for.

        `n_missing`: slots that it would take at most, in whole pages. Where they are free, nobody else is looked at.
        """
        n_available: int = n_free + self._cache.evictable_size()
        if n_missing <= n_free:
            return n_available
        with self.cost:
            n_shared, n_wanted = self._shared_tokens(req), self._wanted_evictable_tokens()
            return available_beside_wanted(n_cached, n_shared, n_available, n_wanted)

    def is_wanted(self, leaf: TreeNode) -> bool:
        """Whether a waiting request would use this leaf of the tree."""
        return self._matches.is_wanted(leaf)

    def cleared(self) -> None:
        """Of the tree, as are the following: everything is gone."""
        with self.cost:
            for req in list(self._matches):
                self._match_on(req, None)

    def child_added(self, child: TreeNode) -> None:
        with self.cost:
            parent = child.parent
            concerned = self._matches.child_added(parent, child.key.child_key(self._cache.page_size))
            start = (parent, end_tokens(parent)) if concerned else None
            for req in concerned:
                self._match_on(req, start)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        with self.cost:
            self._matches.split(lower, upper, end_tokens(upper))

    def leaf_removed(self, leaf: TreeNode) -> None:
        with self.cost:
            if not self._matches.is_wanted(leaf):
                return
            n_tokens = end_tokens(leaf.parent)
            key = leaf.key.child_key(self._cache.page_size)
            for req in self._matches.leaf_removed(leaf, leaf.parent, n_tokens, key):
                self._calibrate(req, n_tokens)

    def _shared_tokens(self, req: Req) -> int:
        """Length of the longest prefix that a request shares with another that waits; its own cached part at least."""
        match = self._matches.match_of(req)
        key = RadixKey(_tokens(req), req.extra_key)
        others = [other for other in self._matches.at_place(match) if other is not req]
        lengths = (key.match(RadixKey(_tokens(other), req.extra_key), self._cache.page_size) for other in others)
        return max(lengths, default=match.n_tokens)

    def _wanted_evictable_tokens(self) -> int:
        """Cached tokens that waiting requests would use and that eviction could take. Costs O(places)."""
        seen: set[TreeNode] = {self._cache.root_node}
        n_tokens = 0
        for node in self._matches.wanted_nodes():
            while node not in seen:
                seen.add(node)
                n_tokens += len(node.key) if node.lock_ref == 0 else 0
                node = node.parent
        return n_tokens

    def _match_on(self, req: Req, start: tuple[TreeNode, int] | None) -> None:
        match = find_match(self._cache, _tokens(req), req.extra_key, start)
        self._matches.place(req, match)
        self._calibrate(req, match.n_tokens)

    def _calibrate(self, req: Req, n_matched: int) -> None:
        n_input = self.order.waiting(req).n_input_tokens
        self.order.calibrate(req, _usable(req, n_input, n_matched))


def _tokens(req: Req) -> array[int]:
    # A preempted generation has output tokens too; the sum copies the whole prompt.
    tokens: array[int] = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
    return tokens


def _usable(req: Req, n_input: int, n_matched: int) -> int:
    """What SGLang would reuse: it always computes the last token, and more where log-probabilities are asked for."""
    limit: int = req._compute_max_prefix_len(n_input)
    return min(n_matched, limit)
