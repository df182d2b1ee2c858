"""Allocates KV slots: durable slots as in SGLang, and scratch slots for one forward pass.

Scratch has no free list: the requests of a step get consecutive pieces from its start, and return all of them before the next
step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sgl_prefill.core.kv_plan import KVPlan, ceil_to


class SuffixKVAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator of the durable slots. Within `serving`, it allocates durable and scratch slots by the step's plans."""

    def __init__(self, *, first_scratch_slot: int, scratch_tokens: int, **options: Any) -> None:
        self.first_scratch_slot = first_scratch_slot
        self.scratch_tokens = scratch_tokens
        self.n_scratch_lent = 0
        self._plans: Sequence[KVPlan] | None = None
        self.free_pages: torch.Tensor
        super().__init__(**options)

    @contextmanager
    def serving(self, plans: Sequence[KVPlan]) -> Iterator[None]:
        """The next allocation within the block is for these requests, in this order. Their durable slots must be free."""
        assert self.n_scratch_lent == 0, "another forward pass still holds scratch"
        n_scratch = sum(ceil_to(plan.n_scratch, self.page_size) for plan in plans)
        assert n_scratch <= self.scratch_tokens, (plans, self.scratch_tokens)
        self._plans = plans
        try:
            yield
        finally:
            self._plans = None

    def give_back_scratch(self, plan: KVPlan) -> None:
        """Call it once the request's forward pass has been computed."""
        self.n_scratch_lent -= ceil_to(plan.n_scratch, self.page_size)
        assert self.n_scratch_lent >= 0

    def available_size(self) -> int:
        """Free durable slots; within `serving` scratch too, so that SGLang itself evicts nothing."""
        free: int = super().available_size()
        return free if self._plans is None else free + self.scratch_tokens

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        """Is what SGLang's admission asks: for a request that ends with its prefill, scratch counts as room."""
        return SuffixKVBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self._plans is None:
            slots: torch.Tensor | None = super().alloc(need_size)
            return slots
        return self._alloc_planned(need_size)

    def alloc_extend(self, *arguments: Any, **options: Any) -> torch.Tensor | None:
        """SGLang calls this instead of `alloc` where a page has several tokens; cached prefixes are whole pages."""
        if self._plans is None:
            slots: torch.Tensor | None = super().alloc_extend(*arguments, **options)
            return slots
        n_tokens = arguments[5] if len(arguments) > 5 else options["extend_num_tokens"]
        return self._alloc_planned(n_tokens)

    def clear(self) -> None:
        super().clear()
        self.n_scratch_lent = 0
        self._pages: torch.Tensor = self.free_pages  # whose end `free_pages` is

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """Writes the pages in front of the free ones, where others were taken. SGLang copies the list of all free pages, some
        milliseconds with a million slots on a host."""
        if self.need_sort:
            super()._release_page_ids(*page_ids)
            return
        pages = torch.cat(page_ids)
        end = len(self._pages) - len(self.free_pages)
        first = end - len(pages)
        assert first >= 0, (len(self._pages), len(self.free_pages), len(pages))
        self._pages[first:end] = pages
        self.free_pages = self._pages[first:]

    def resize_durable(self, durable_tokens: int) -> None:
        """Sets the number of durable slots, and marks all of them as free."""
        self.size, self.num_pages = durable_tokens, durable_tokens // self.page_size
        self.clear()

    def resize_scratch(self, scratch_tokens: int) -> None:
        assert self.n_scratch_lent == 0, self.n_scratch_lent
        self.scratch_tokens = scratch_tokens

    def _alloc_planned(self, n_tokens: int) -> torch.Tensor:
        assert self._plans is not None
        assert n_tokens == sum(plan.n_input - plan.n_reused for plan in self._plans), (n_tokens, self._plans)
        parts = []
        for plan in self._plans:
            if plan.n_new_durable > 0:
                durable = super().alloc(ceil_to(plan.n_new_durable, self.page_size))
                assert durable is not None, (plan, super().available_size())
                parts.append(durable[: plan.n_new_durable])
            if plan.n_scratch > 0:
                first = self.first_scratch_slot + self.n_scratch_lent
                parts.append(torch.arange(first, first + plan.n_scratch, dtype=torch.int64, device=self.device))
                self.n_scratch_lent += ceil_to(plan.n_scratch, self.page_size)
        return torch.cat(parts)


class SuffixKVBudget(PrefillBudget):  # type: ignore[misc]
    """What a step may still take: durable slots, and scratch unless one of its requests generates."""

    counts_scratch = True

    @property
    def remaining_total(self) -> int:
        return int(super().remaining_total) + self._scratch_tokens

    @property
    def remaining_current(self) -> int:
        return int(super().remaining_current) + self._scratch_tokens

    @property
    def _scratch_tokens(self) -> int:
        # SGLang reserves a page and one token more than a request needs.
        return int(self.allocator.scratch_tokens + 2 * self.page_size + 2) if self.counts_scratch else 0
