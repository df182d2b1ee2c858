"""SGLang's KV pool with suffix scratch: every layer's K and V buffer is one tensor whose tail all layers share.

    slot:      0 .. page | page ........... first_scratch_slot | ............... n_slots
    layer 0:   padding   | durable slots, this layer's own     | scratch, the same memory in every layer
    layer 1:   padding   | durable slots, this layer's own     | scratch, the same memory in every layer

A layer writes suffix K and V into scratch, attends, and the next layer overwrites them: one layer's KV is live at a time,
and no attention kernel knows of it.

Why the next layer never writes too early: in a forward pass all writes and reads of KV are enqueued on one stream, layer by
layer, and the write of layer i + 1 needs the output of attention i. SGLang can put KV copies on a second stream (only while
it captures a CUDA graph); this pool is built without that stream, so a captured graph has the same single order.
"""

from __future__ import annotations

import atexit
import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.device import AliasedMemory, device_of
from sgl_prefill.errors import AliasedMemoryError


class SuffixKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """`size` of the base class is durable and scratch tokens together. Buffers are freed at exit.

    Raises AliasedMemoryError where memory is refused, or where SGLang is told to lay KV out in another way.
    """

    def __init__(self, durable_tokens: int, scratch_tokens: int, **options: Any) -> None:
        """Makes the pool. `durable_tokens` is an upper limit: only what `commit` names gets memory. Both are rounded up to
        what the mapping granularity asks for.
        """
        page_size: int = options["page_size"]
        unit = _slots_per_granule(options)
        self.durable_tokens = ceil_to(durable_tokens + page_size, unit) - page_size
        self.scratch_tokens = ceil_to(scratch_tokens, unit)
        self.first_scratch_slot = page_size + self.durable_tokens
        self._memory: list[AliasedMemory] = []
        super().__init__(self.durable_tokens + self.scratch_tokens, enable_alt_stream=False, **options)
        atexit.register(self.close)

    def commit(self, durable_tokens: int) -> None:
        """Give the first `durable_tokens` durable slots memory, once it is known how many fit."""
        assert durable_tokens <= self.durable_tokens
        self.durable_tokens = durable_tokens
        for memory, row_bytes in zip(self._memory, self._row_bytes(), strict=True):
            memory.commit_own((self.page_size + durable_tokens) * row_bytes)

    def fill_scratch(self, value: float, n_tokens: int | None = None) -> None:
        """Fills scratch, for checks: whatever reads scratch that it has not written must show. None: all of it."""
        first = self.first_scratch_slot
        last = None if n_tokens is None else first + n_tokens
        for buffer in (self.k_buffer[0], self.v_buffer[0]):
            buffer[first:last] = value

    def close(self) -> None:
        for memory in self._memory:
            memory.close()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Returns (K, V): physical memory, scratch counted once."""
        slots = self.page_size + self.durable_tokens
        key, value = ((self.layer_num * slots + self.scratch_tokens) * row_bytes for row_bytes in self._row_bytes())
        return key, value

    def _row_bytes(self) -> tuple[int, int]:
        itemsize = self.store_dtype.itemsize
        return self.head_num * self.head_dim * itemsize, self.head_num * self.v_head_dim * itemsize

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd":
            raise AliasedMemoryError(
                f"--suffix-kv evict needs the KV cache layout nhd, and this is {self.kv_cache_layout}:"
                " start with --suffix-kv keep"
            )
        key_bytes, value_bytes = self._row_bytes()
        self.k_buffer = self._aliased(key_bytes, self.head_dim)
        self.v_buffer = self._aliased(value_bytes, self.v_head_dim)

    def _aliased(self, row_bytes: int, head_dim: int) -> list[torch.Tensor]:
        own, shared = self.first_scratch_slot * row_bytes, self.scratch_tokens * row_bytes
        memory = device_of(self.device).aliased_memory(self.layer_num, own, shared)
        self._memory.append(memory)
        return [flat.view(self.store_dtype).view(-1, self.head_num, head_dim) for flat in memory.tensors]


def _slots_per_granule(options: dict[str, Any]) -> int:
    """Counts the slots whose K and whose V both fill whole granules, in whole pages."""
    granule = device_of(options["device"]).granularity_bytes()
    itemsize = options["dtype"].itemsize
    head_dims = (options["head_dim"], options.get("v_head_dim") or options["head_dim"])
    slots = (granule // math.gcd(granule, options["head_num"] * head_dim * itemsize) for head_dim in head_dims)
    return math.lcm(options["page_size"], *slots)
