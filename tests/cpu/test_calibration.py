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

from sgl_prefill.core.calibration import Calibration
from sgl_prefill.core.jct import cache_miss_tokens
from sgl_prefill.core.job import Job
from sgl_prefill.core.lazy_heap import LazyHeap
from sgl_prefill.core.ordered_sums import OrderedSums
from sgl_prefill.core.policies.srjf import CalibratedSrjf, cost_per_job
from sgl_prefill.core.policy import PolicySettings
from sgl_prefill.port.kv.namespaces import Namespace
from sgl_prefill.port.kv.radix_cache import RadixTree
from tests.cpu.test_scheduling_glue import calibrated, count_cached_tokens, insert, nodes, waiting_job, watched_tree

FAIRNESS_LAMBDA = 3.0
# Three letters: prefixes overlap often, and nodes split everywhere.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
# Tenants have some prefixes in common. A server has them, or requests that are nobody's, but not both.
TENANTS = [Namespace("a/"), Namespace("b/"), "salt"]
SALTS = st.sampled_from(range(3))


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, departures, insertions, look-ups that split, evictions and flushes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Job] = []
        self.clock_s = 1.0  # 0 means "not stamped" to SGLang

    @initialize(page_size=st.sampled_from([1, 2]), counts_sharers=st.booleans(), public=st.lists(PROMPTS, max_size=2))
    def start(self, page_size: int, counts_sharers: bool, public: list[list[int]]) -> None:
        self.tree = watched_tree(page_size)
        for tokens in public:
            self.tree.share(array("q", tokens))
        self.namespaces: list[str | None] = [*TENANTS] if public else [None, "salt", None]
        self.counts_sharers = counts_sharers
        settings = PolicySettings(fairness_lambda=FAIRNESS_LAMBDA, counts_sharers=counts_sharers)
        self.policy = CalibratedSrjf(settings)
        self.calibration = calibrated(self.tree, self.policy)

    @rule(tokens=PROMPTS, salt=SALTS, seconds=st.floats(0, 2))
    def arrive(self, tokens: list[int], salt: int, seconds: float) -> None:
        self.clock_s += seconds
        job = waiting_job(tokens, self.clock_s, self.namespaces[salt])
        self.waiting.append(job)
        self.calibration.add(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.calibration.remove(job)

    @rule(tokens=PROMPTS, salt=SALTS)
    def cache(self, tokens: list[int], salt: int) -> None:
        key = RadixKey(array("q", tokens), self.namespaces[salt])
        self.tree.insert(InsertParams(key=key, value=torch.tensor(tokens)))

    @rule(tokens=PROMPTS, salt=SALTS)
    def look_up(self, tokens: list[int], salt: int) -> None:
        self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), self.namespaces[salt])))

    @rule(n_tokens=st.integers(1, 12))
    def evict(self, n_tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=n_tokens))

    @rule()
    def flush(self) -> None:
        self.tree.reset()

    @invariant()
    def the_order_is_that_of_matching_anew(self) -> None:
        if not hasattr(self, "policy"):
            return

        def score(job: Job) -> float:
            n_cached = min(count_cached_tokens(self.tree, list(job.tokens), job.namespace), job.n_input_tokens - 1)
            assert job.n_cached_tokens == n_cached
            cost = cost_per_job(cache_miss_tokens, job) if self.counts_sharers else job.n_miss_tokens
            since_s = self.policy.since_s(job)
            assert since_s <= job.arrival_s
            assert self.counts_sharers or since_s == job.arrival_s
            return cost + FAIRNESS_LAMBDA * since_s

        # `sorted` is stable: ties stay in the order of arrival.
        assert list(self.policy.in_order(self.clock_s)) == sorted(self.waiting, key=score)

    @invariant()
    def one_of_each_group_counts_the_others(self) -> None:
        """Groups found anew: those that leave the tree at one place and go on with the same page."""
        if not hasattr(self, "policy"):
            return
        groups: dict[Any, list[Job]] = {}
        for job in self.waiting:
            match = RadixTree(self.tree).match(job)
            assert job.next_page == match.next_page
            if match.next_page is not None:
                groups.setdefault(match.next_page, []).append(job)
        in_groups = {job for group in groups.values() for job in group}
        assert all(job.n_sharers == 0 and not job.is_follower for job in self.waiting if job not in in_groups)
        for group in groups.values():
            assert sorted(job.n_sharers for job in group) == [0] * (len(group) - 1) + [len(group) - 1]
            (leader,) = [job for job in group if not job.is_follower]
            assert leader.n_sharers == len(group) - 1
            assert all(job.n_shared_tokens <= job.n_input_tokens for job in group)

    @invariant()
    def the_kv_side_may_ask_about_anybody(self) -> None:
        """Also about jobs shorter than a page, which stand at the root together, whatever their namespace."""
        if not hasattr(self, "policy"):
            return
        for job in self.waiting:
            room = self.calibration.advisor.room_for(job, job.n_cached_tokens, n_missing=100, n_free=0)
            assert 0 <= room <= self.tree.evictable_size()


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCalibration = AnyHistory.TestCase


def test_waiting_requests_leave_the_tree_as_it_is() -> None:
    """1,000 of them: no access time, no split; where nobody is asked what is wanted, the same leaves go in the same order."""
    rng = random.Random(0)
    history = [rng.choices(range(3), k=rng.randrange(1, 30)) for _ in range(80)]

    def evicted(n_waiting: int) -> list[list[int]]:
        tree = watched_tree()
        calibration = Calibration(RadixTree(tree), CalibratedSrjf(PolicySettings()))
        tree.listener = calibration
        for tokens in history:
            insert(tree, tokens)
        before = nodes(tree)
        for index in range(n_waiting):
            calibration.add(waiting_job([*history[index % 7], 9, 9]))
        assert nodes(tree) == before
        order: list[list[int]] = []
        tree.token_to_kv_pool_allocator = SimpleNamespace(free_segment=lambda value, **_: order.append(value.tolist()))
        while tree.evictable_size() > 0:
            tree.evict(EvictParams(num_tokens=1))
        return order

    assert evicted(0) == evicted(1000)


def test_what_waiting_requests_will_use_is_evicted_last_whoever_evicts() -> None:
    """SGLang's own eviction, which is all that runs with --suffix-kv keep: the oldest prefix is wanted, and stays longest."""
    tree = watched_tree()
    calibration = calibrated(tree, CalibratedSrjf(PolicySettings()))
    for prefix in (1, 2, 3):
        insert(tree, [prefix] * 50)
    job = waiting_job([*[1] * 50, 9])
    calibration.add(job)
    tree.evict(EvictParams(num_tokens=100))
    assert [count_cached_tokens(tree, [prefix] * 50) for prefix in (1, 2, 3)] == [50, 0, 0]
    calibration.remove(job)
    insert(tree, [4] * 50)
    tree.evict(EvictParams(num_tokens=50))
    assert [count_cached_tokens(tree, [prefix] * 50) for prefix in (1, 4)] == [0, 50]


def test_sorted_sums_stay_sorted_and_add_up() -> None:
    """Against a dictionary sorted anew, with enough items to split blocks and empty them again."""
    rng, sums, expected = random.Random(2), OrderedSums[int](n_weights=1), dict[int, tuple[int, float]]()
    for number in range(8000):
        item = rng.randrange(900)
        if rng.random() < (0.2 if number < 6000 else 0.7):
            sums.discard(item)
            expected.pop(item, None)
        else:
            expected[item] = rng.randrange(100), rng.random()
            sums.put(item, expected[item][0], (expected[item][1],))
        assert (item in sums) == (item in expected)
        if number % 100 == 0 and expected:
            order = list(sums)
            assert [expected[one][0] for one in order] == sorted(key for key, _ in expected.values())
            assert (len(sums), sums.first()) == (len(expected), order[0])
            place = rng.randrange(len(order))
            n_before, (total,) = sums.before(order[place])
            assert n_before == place
            assert total == pytest.approx(sum(expected[one][1] for one in order[:place]))
            assert list(sums.after(order[place])) == order[place + 1 :]


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
