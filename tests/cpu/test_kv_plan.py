"""Which KV is kept, and who holds which slot: properties over all sequences of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_prefill.core.kv_plan import KVPlan, available_beside_wanted, ceil_to, plan_kv
from sgl_prefill.port.kv.allocator import SuffixKVAllocator


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(n_input, n_cached, n_available, page_size) as they can occur."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    n_input = draw(st.integers(1, 400))
    n_cached = draw(st.integers(0, (n_input - 1) // page_size)) * page_size
    return n_input, n_cached, draw(st.integers(0, 40)) * page_size, page_size


@given(situations())
def test_a_plan_keeps_the_longest_prefix_that_fits(situation: tuple[int, int, int, int]) -> None:
    """It never asks for more than is available, and one page more would be too much."""
    n_input, n_cached, n_available, page_size = situation
    plan = plan_kv(n_input, n_cached, n_available, page_size)
    assert plan.n_cached <= plan.n_durable <= plan.n_input
    assert plan.n_durable + plan.n_scratch == n_input
    assert ceil_to(plan.n_new_durable, page_size) <= n_available
    if plan.n_scratch > 0:
        assert plan.n_durable % page_size == 0, "the tree holds whole pages"
        longer = min(plan.n_durable + page_size, n_input)
        assert ceil_to(longer - n_cached, page_size) > n_available


def test_a_request_that_decodes_is_durable_or_refused() -> None:
    """Its KV is read again after the prefill."""
    assert plan_kv(100, 40, 60, all_durable=True).n_scratch == 0
    with pytest.raises(ValueError, match=r"60 tokens need durable slots, and 59"):
        plan_kv(100, 40, 59, all_durable=True)


def make_allocator(durable_tokens: int, scratch_tokens: int, page_size: int) -> SuffixKVAllocator:
    return SuffixKVAllocator(
        first_scratch_slot=page_size + durable_tokens,
        scratch_tokens=scratch_tokens,
        size=durable_tokens,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        kvcache=None,
        need_sort=False,
    )


class Slots(RuleBasedStateMachine):
    """Requests come and go on a small allocator; the machine plays the prefix cache."""

    page_size = 4
    durable_tokens = 64
    scratch_tokens = 160

    def __init__(self) -> None:
        super().__init__()
        self.allocator = make_allocator(self.durable_tokens, self.scratch_tokens, self.page_size)
        self.cached: list[torch.Tensor] = []  # durable slots that the tree holds, one entry a former request
        self.running: list[tuple[KVPlan, torch.Tensor]] = []

    @precondition(lambda self: not self.running)
    @rule(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=2))
    def launch(self, lengths: list[int]) -> None:
        """One forward pass with one or two requests, nothing cached."""
        plans, promised = [], 0
        for n_input in lengths:
            plan = plan_kv(n_input, 0, self.allocator.available_size() - promised, self.page_size)
            promised += ceil_to(plan.n_new_durable, self.page_size)
            plans.append(plan)
        with self.allocator.serving(plans):
            slots = self.allocator.alloc_extend(*[None] * 5, sum(lengths))
        assert slots is not None
        parts = torch.split(slots, lengths)
        self.running = list(zip(plans, parts, strict=True))

    @precondition(lambda self: self.running)
    @rule(is_kept=st.booleans())
    def finish(self, is_kept: bool) -> None:
        """All requests of the pass end: their whole durable pages go to the tree, or are freed."""
        for plan, slots in self.running:
            n_kept = plan.n_durable // self.page_size * self.page_size if is_kept else 0
            if n_kept:
                self.cached.append(slots[:n_kept])
            self.allocator.free_segment(slots[n_kept : plan.n_durable], start_pos=n_kept)
            self.allocator.give_back_scratch(plan)
        self.running = []

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.cached) - 1))
        self.allocator.free_segment(self.cached.pop(index), start_pos=0)

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        free = (self.allocator.free_pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        used = [slots for _, slots in self.running]
        held = torch.cat([free, *self.cached, *used]).tolist()
        assert len(held) == len(set(held))

    @invariant()
    def the_tree_holds_no_scratch(self) -> None:
        assert all(int(slots.max()) < self.allocator.first_scratch_slot for slots in self.cached)
        assert all(int(slots.min()) >= self.page_size for slots in self.cached), "page 0 is padding"

    @invariant()
    def free_cached_and_in_use_make_the_total(self) -> None:
        in_use = sum(ceil_to(plan.n_new_durable, self.page_size) for plan, _ in self.running)
        cached = sum(len(slots) for slots in self.cached)
        assert self.allocator.available_size() + cached + in_use == self.durable_tokens
        if not self.running:
            assert self.allocator.n_scratch_lent == 0

    @invariant()
    def positions_lie_in_pages(self) -> None:
        """Position p of a request sits at place p modulo the page size of its page, as paged kernels assume."""
        for plan, slots in self.running:
            assert torch.equal(slots % self.page_size, torch.arange(plan.n_input) % self.page_size)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_scratch_is_lent_to_one_forward_pass_at_a_time() -> None:
    """A second pass before the first has given its scratch back would overwrite KV that is still read."""
    allocator = make_allocator(8, 64, 1)
    plan = plan_kv(20, 0, 8)
    with allocator.serving([plan]):
        assert allocator.alloc(20) is not None
    with pytest.raises(AssertionError, match="another forward pass"), allocator.serving([plan]):
        pass


def test_while_a_plan_is_served_sglang_sees_room_and_evicts_nothing() -> None:
    """Its allocation evicts until the allocator says that enough is free."""
    allocator = make_allocator(8, 64, 1)
    with allocator.serving([plan_kv(20, 0, 8)]):
        assert allocator.available_size() >= 20
    assert allocator.available_size() == 8


def test_the_radix_cache_gets_the_durable_part_alone() -> None:
    """A request of 12 tokens with 8 durable ones leaves 8 in the tree; the slots beyond are handed back, not freed."""
    from array import array

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sgl_prefill.port.kv.radix_cache import WatchedRadixCache

    allocator = make_allocator(8, 64, 1)
    row = torch.zeros(1, 32, dtype=torch.int64)
    pools: Any = SimpleNamespace(req_to_token=row, write=row.__setitem__)
    cache = WatchedRadixCache(
        CacheInitParams(disable=False, req_to_token_pool=pools, token_to_kv_pool_allocator=allocator, page_size=1)
    )
    plan = plan_kv(12, 0, allocator.available_size())
    assert plan.n_durable == 8
    with allocator.serving([plan]):
        slots = allocator.alloc(12)
    assert slots is not None
    row[0, :12] = slots
    kv = SimpleNamespace(req_pool_idx=0, cache_protected_len=0, kv_allocated_len=12, holds_mamba=False)
    req: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=None),
        origin_input_ids=array("q", range(12)),
        output_ids=array("q"),
        kv=kv,
        extra_key=None,
        cache_salt=None,
        last_node=cache.root_node,
        priority=0,
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    kv.swa_evict_floor = kv.cache_inserted_len = 0
    req.lock = cache.lock(cache.root_node)
    cache.lend_scratch(req, plan)
    cache.checkpoint(req, up_to=12)
    cache.free_kv_row(kv, [(kv.cache_protected_len, 12)])
    cache.on_release(req, checkpointed=True)
    assert cache.total_size() == 8
    assert int(cache.all_values_flatten().max()) < allocator.first_scratch_slot
    assert allocator.n_scratch_lent == 0
    assert allocator.available_size() == 0


def test_a_tail_that_nobody_shares_takes_only_what_nobody_waits_for() -> None:
    """100 slots, 60 of them wanted: a lone request gets 40, one whose first 70 tokens are waited for gets those 70."""
    assert available_beside_wanted(n_cached=0, n_shared=0, n_available=100, n_wanted=60) == 40
    assert available_beside_wanted(n_cached=0, n_shared=70, n_available=100, n_wanted=60) == 70
    assert available_beside_wanted(n_cached=20, n_shared=70, n_available=100, n_wanted=60) == 50
    assert available_beside_wanted(n_cached=0, n_shared=300, n_available=100, n_wanted=60) == 100
    assert available_beside_wanted(n_cached=50, n_shared=50, n_available=10, n_wanted=60) == 0
