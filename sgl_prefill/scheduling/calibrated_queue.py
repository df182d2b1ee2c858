"""The core policy over SGLang's waiting requests, kept calibrated by what the radix tree reports."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.jct import FittedJct, JctModel, Work
from sgl_prefill.core.kv_plan import available_beside_wanted, ceil_to
from sgl_prefill.core.match_index import MatchIndex
from sgl_prefill.core.packing import Steps, fill_steps, pack
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
        *,
        counts_sharers: bool = False,
    ) -> None:
        self._cache, self._priority_sign, self._counts_sharers = cache, priority_sign, counts_sharers
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
        self._count_sharers()

    def remove(self, req: Req) -> None:
        """A request runs, or has left."""
        self._matches.remove(req)
        self.order.remove(req)
        self._count_sharers()

    def pick(self, now_s: float, max_tokens: int, max_requests: int) -> list[Req]:
        """The requests of the next step, which stay; one where `max_tokens` is 0."""
        if max_tokens == 0 or max_requests == 1:
            first = self.order.first(now_s)
            return [] if first is None else [first]
        return pack(self.order.in_order(now_s), self._miss_tokens, self._waits_for, max_tokens, max_requests)

    def work_until_done(self, req: Req, jct_ms: FittedJct, max_tokens: int, max_requests: int) -> tuple[Work, int]:
        """(what is to be done until a waiting request has run, were nobody to arrive any more; how many run before it).

        A prefix that several of them wait for is counted once, and their steps with all who share them: later requests fill
        the last. Costs O(waiting requests).
        """
        before = self.order.before(req)
        groups: dict[Hashable, list[Req]] = {}
        for other in [*before, req]:
            groups.setdefault(self._waits_for(other) or other, []).append(other)
        requests = []
        for members in groups.values():
            n_shared = _shared_prefix(self._cache, members[0], members[1]) if len(members) > 1 else 0
            for index, member in enumerate(members):
                n_input, n_cached, *_ = self.order.waiting(member)
                requests.append((n_input, n_cached if index == 0 else _usable(member, n_input, n_shared)))
        steps = fill_steps([n_input - n_cached for n_input, n_cached in requests], max_tokens, max_requests)
        if len(groups) < len(requests) and steps.n_steps == 1:
            steps = steps._replace(n_steps=2)  # nobody shares a step with the one whose prefix it waits for
        requests += self._riders({*before, req}, steps)
        return jct_ms.of_steps(steps.n_steps, requests), len(before)

    def _riders(self, ahead: set[Req], steps: Steps) -> list[tuple[int, int]]:
        """(input tokens, cached tokens) of requests that take what room is left; the oldest, for to sort them would cost."""
        riders: list[tuple[int, int]] = []
        room_tokens = steps.room_tokens
        for other in self.order:
            if room_tokens <= 0 or len(riders) >= steps.room_requests:
                break
            n_miss = self._miss_tokens(other)
            if other not in ahead and n_miss <= room_tokens:
                n_input, n_cached, *_ = self.order.waiting(other)
                riders.append((n_input, n_cached))
                room_tokens -= n_miss
        return riders

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
            self._count_sharers()

    def child_added(self, child: TreeNode) -> None:
        with self.cost:
            parent = child.parent
            concerned = self._matches.child_added(parent, child.key.child_key(self._cache.page_size))
            start = (parent, end_tokens(parent)) if concerned else None
            for req in concerned:
                self._match_on(req, start)
            if self._counts_sharers:
                self.order.credit_together(concerned)
            self._count_sharers()

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
            self._count_sharers()

    def _miss_tokens(self, req: Req) -> int:
        """In whole pages: what a step must have room for."""
        waiting = self.order.waiting(req)
        return ceil_to(waiting.n_input_tokens - waiting.n_cached_tokens, self._cache.page_size)

    def _waits_for(self, req: Req) -> Hashable | None:
        match = self._matches.match_of(req)
        return None if match.next_key is None else match.place

    def _shared_tokens(self, req: Req) -> int:
        """Length of the longest prefix that a request shares with another that waits; its own cached part at least."""
        match = self._matches.match_of(req)
        tokens, n_shared = _tokens(req), match.n_tokens
        for other in self._matches.at_place(match):
            theirs = _tokens(other)
            # Who differs at the end of what is shared so far cannot share more.
            if other is not req and theirs[n_shared : n_shared + 1] == tokens[n_shared : n_shared + 1]:
                n_shared = max(n_shared, _shared_prefix(self._cache, req, other))
        return n_shared

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

    def _count_sharers(self) -> None:
        """The first of each group speaks for all: what it would compute, the others will find."""
        for first, second, n_members in self._matches.take_changed_groups():
            if not self._counts_sharers:
                continue
            known = self.order.waiting(first)
            n_input, n_cached, n_shared = known.n_input_tokens, known.n_cached_tokens, known.n_shared_tokens
            if second is None:
                n_shared = 0
            elif known.n_sharers == 0:  # else it has been first here before, and what two of them share stands for all
                n_shared = _usable(first, n_input, _shared_prefix(self._cache, first, second))
            self.order.calibrate(first, n_cached, n_members - 1, n_shared)


def _shared_prefix(cache: WatchedRadixCache, one: Req, other: Req) -> int:
    """Tokens in whole pages, of two requests in one namespace."""
    n_shared: int = RadixKey(_tokens(one), one.extra_key).match(
        RadixKey(_tokens(other), other.extra_key), cache.page_size
    )
    return n_shared


def _tokens(req: Req) -> array[int]:
    # A preempted generation has output tokens too; the sum copies the whole prompt.
    tokens: array[int] = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
    return tokens


def _usable(req: Req, n_input: int, n_matched: int) -> int:
    """What SGLang would reuse: it always computes the last token, and more where log-probabilities are asked for."""
    limit: int = req._compute_max_prefix_len(n_input)
    return min(n_matched, limit)
