"""Incremental calibration equals matching every waiting request anew, whatever happens to the tree (SGLang's real one)."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.jct import cache_miss_tokens
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.srjf import cost_per_request
from sgl_prefill.scheduling.calibrated_queue import CalibratedQueue
from sgl_prefill.scheduling.radix_probe import count_cached_tokens, find_match
from tests.cpu.test_scheduling_glue import insert, nodes, request, watched_tree

FAIRNESS_LAMBDA = 3.0
# Three letters: prefixes overlap often, and nodes split everywhere.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
SALTS = st.sampled_from([None, "salt"])


class Calibration(RuleBasedStateMachine):
    """Arrivals, departures, insertions, look-ups that split, evictions and flushes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []
        self.clock_s = 1.0  # 0 means "not stamped" to SGLang

    @initialize(page_size=st.sampled_from([1, 2]), counts_sharers=st.booleans())
    def start(self, page_size: int, counts_sharers: bool) -> None:
        self.tree = watched_tree(page_size)
        self.counts_sharers = counts_sharers
        self.queue = CalibratedQueue(self.tree, cache_miss_tokens, FAIRNESS_LAMBDA, counts_sharers=counts_sharers)

    @rule(tokens=PROMPTS, salt=SALTS, seconds=st.floats(0, 2))
    def arrive(self, tokens: list[int], salt: str | None, seconds: float) -> None:
        self.clock_s += seconds
        req = request(str(len(self.waiting)), tokens, self.clock_s)
        req.extra_key = salt
        self.waiting.append(req)
        self.queue.add(req)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        req = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(req)

    @rule(tokens=PROMPTS, salt=SALTS)
    def cache(self, tokens: list[int], salt: str | None) -> None:
        key = RadixKey(array("q", tokens), salt)
        self.tree.insert(InsertParams(key=key, value=torch.tensor(tokens)))

    @rule(tokens=PROMPTS, salt=SALTS)
    def look_up(self, tokens: list[int], salt: str | None) -> None:
        self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), salt)))

    @rule(n_tokens=st.integers(1, 12))
    def evict(self, n_tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=n_tokens))

    @rule()
    def flush(self) -> None:
        self.tree.reset()

    @invariant()
    def the_order_is_that_of_matching_anew(self) -> None:
        if not hasattr(self, "queue"):
            return

        def score(req: Any) -> float:
            n_input = len(req.origin_input_ids)
            n_cached = min(count_cached_tokens(self.tree, req.origin_input_ids, req.extra_key), n_input - 1)
            assert self.queue.order.waiting(req).n_cached_tokens == n_cached
            cost = cost_per_request(cache_miss_tokens, self.queue.order.waiting(req))
            assert self.counts_sharers or cost == n_input - n_cached
            since_s = self.queue.order.waiting(req).since_s
            assert since_s <= req.time_stats.api_server_dispatch_time
            assert self.counts_sharers or since_s == req.time_stats.api_server_dispatch_time
            return float(cost + FAIRNESS_LAMBDA * since_s)

        # `sorted` is stable: ties stay in the order of arrival.
        assert list(self.queue.order.in_order(self.clock_s)) == sorted(self.waiting, key=score)

    @invariant()
    def one_of_each_group_counts_the_others(self) -> None:
        """Groups found anew: those that leave the tree at one place and go on with the same page."""
        if not hasattr(self, "queue"):
            return
        groups: dict[Any, list[Any]] = {}
        for req in self.waiting:
            match = find_match(self.tree, req.origin_input_ids, req.extra_key)
            if match.next_key is not None:
                groups.setdefault(match.place, []).append(req)
        in_groups = {id(req) for group in groups.values() for req in group}
        assert all(self.queue.order.waiting(req).n_sharers == 0 for req in self.waiting if id(req) not in in_groups)
        for group in groups.values():
            counted = sorted(self.queue.order.waiting(req).n_sharers for req in group)
            expected = len(group) - 1 if self.counts_sharers else 0
            assert counted == [0] * (len(group) - 1) + [expected]


Calibration.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCalibration = Calibration.TestCase


def test_waiting_requests_leave_the_tree_as_it_is() -> None:
    """1,000 of them: no access time, no split, and the same leaves are evicted in the same order as without."""
    rng = random.Random(0)
    history = [rng.choices(range(3), k=rng.randrange(1, 30)) for _ in range(80)]

    def evicted(n_waiting: int) -> list[list[int]]:
        tree = watched_tree()
        queue = CalibratedQueue(tree, cache_miss_tokens, 0.0)
        for tokens in history:
            insert(tree, tokens)
        before = nodes(tree)
        for index in range(n_waiting):
            queue.add(request(str(index), history[index % 7] + [9, 9]))
        assert nodes(tree) == before
        order: list[list[int]] = []
        tree.token_to_kv_pool_allocator = SimpleNamespace(free_segment=lambda value, **_: order.append(value.tolist()))
        while tree.evictable_size() > 0:
            tree.evict(EvictParams(num_tokens=1))
        return order

    assert evicted(0) == evicted(1000)


def test_a_heap_with_changing_keys_stays_sorted() -> None:
    """Against a dictionary sorted anew, with enough changes to rebuild the heap."""
    rng, heap, expected = random.Random(1), LazyHeap[int](), dict[int, float]()
    for _ in range(3000):
        item = rng.randrange(60)
        if rng.random() < 0.2:
            heap.discard(item)
            expected.pop(item, None)
        else:
            expected[item] = rng.random()
            heap.put(item, expected[item])
        assert heap.first() == min(expected, key=expected.__getitem__, default=None)
    assert list(heap.in_order()) == sorted(expected, key=expected.__getitem__)
    assert len(heap) == len(expected)
    with pytest.raises(KeyError):
        heap.key_of(99)
