"""SGLang's KV pools with suffix scratch: every layer's buffer of K, of V, or of latent rows (MLA) is one tensor whose tail all
layers share.

    slot:      0 .. page | page ........... first_scratch_slot | ............... n_slots
    layer 0:   padding   | durable slots, this layer's own     | scratch, the same memory in every layer
    layer 1:   padding   | durable slots, this layer's own     | scratch, the same memory in every layer

A layer writes suffix K and V into scratch, attends, and the next layer overwrites them: one layer's KV is live at a time.
Attention kernels need no change.

The next layer never writes too early: all writes and reads of KV are enqueued on one stream, and the write of layer i + 1 needs
the output of attention i. SGLang can copy KV on a second stream while it captures a CUDA graph; this pool has no such stream.
"""

from __future__ import annotations

import atexit
import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.errors import AliasedMemoryError
from sgl_prefill.startup.device import AliasedMemory, device_of


class _SuffixPool:
    """`size` of SGLang's class counts durable and scratch tokens. Buffers are freed at exit.

    Raises AliasedMemoryError where memory cannot be mapped.
    """

    layer_num: int
    page_size: int
    device: str
    dtype: torch.dtype
    store_dtype: torch.dtype

    def __init__(self, durable_tokens: int, scratch_tokens: int, **options: Any) -> None:
        """Reserves addresses for both numbers, rounded up to the mapping granularity. On a device `commit` and `commit_scratch`
        back them with memory.
        """
        page_size: int = options["page_size"]
        unit = _slots_per_granule(options["device"], page_size, self.rows_of(options))
        self.most_durable_tokens = durable_tokens
        self.durable_tokens = ceil_to(durable_tokens + page_size, unit) - page_size
        self.scratch_tokens = ceil_to(scratch_tokens, unit)
        self.first_scratch_slot = page_size + self.durable_tokens
        self.backed_scratch_tokens = self.scratch_tokens if device_of(options["device"]).backs_on_use else 0
        self._row_bytes = self.rows_of(options)
        self._memory: list[AliasedMemory] = []
        try:
            super().__init__(self.durable_tokens + self.scratch_tokens, **options)  # type: ignore[call-arg]
            self._commit_own(0)  # the padding page, which SGLang uses before the memory plan is made
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    @property
    def backed_bytes(self) -> int:
        """Committed device memory; 0 on a host."""
        return sum(memory.backed_bytes for memory in self._memory)

    @property
    def rounding_bytes(self) -> int:
        """Upper limit of the device memory that all slots take beyond their own bytes; 0 on a host."""
        if device_of(self.device).backs_on_use:
            return 0
        padding: int = self.layer_num * self.page_size * sum(self.row_bytes())
        return padding + sum(memory.rounding_bytes for memory in self._memory)

    def commit(self, durable_tokens: int) -> None:
        """Backs the first `durable_tokens` durable slots with memory; there are no more from then on."""
        assert durable_tokens <= self.durable_tokens
        self._commit_own(durable_tokens)
        self.durable_tokens = durable_tokens

    def commit_scratch(self, n_tokens: int) -> None:
        """Backs the first `n_tokens` scratch slots with memory. Where it raises NoMemoryLeftError, some of them may be backed."""
        assert n_tokens <= self.scratch_tokens, (n_tokens, self.scratch_tokens)
        if n_tokens <= self.backed_scratch_tokens:
            return
        for memory, row_bytes in zip(self._memory, self.row_bytes(), strict=True):
            memory.commit_shared(n_tokens * row_bytes)
        self.backed_scratch_tokens = n_tokens

    def release_scratch(self) -> None:
        """Frees a device's memory for scratch."""
        if device_of(self.device).backs_on_use:
            return
        for memory in self._memory:
            memory.release_shared()
        self.backed_scratch_tokens = 0

    def fill_scratch(self, value: float, n_tokens: int | None = None) -> None:
        """Fills scratch, so that a check notices a read of a slot that was not written. n_tokens: None: all backed slots."""
        first = self.first_scratch_slot
        last = first + (self.backed_scratch_tokens if n_tokens is None else n_tokens)
        for memory, row_bytes in zip(self._memory, self.row_bytes(), strict=True):
            itemsize = self.dtype.itemsize
            flat = memory.tensors[0].view(self.dtype)
            flat[first * row_bytes // itemsize : last * row_bytes // itemsize] = value

    def _commit_own(self, durable_tokens: int) -> None:
        for memory, row_bytes in zip(self._memory, self.row_bytes(), strict=True):
            memory.commit_own((self.page_size + durable_tokens) * row_bytes)

    def close(self) -> None:
        """Frees all memory; no buffer may be used afterwards. Idempotent."""
        for memory in self._memory:
            memory.close()

    def _bytes_of_buffers(self) -> list[int]:
        """Returns bytes of physical memory, scratch counted once."""
        slots = self.page_size + self.durable_tokens
        return [(self.layer_num * slots + self.backed_scratch_tokens) * row_bytes for row_bytes in self.row_bytes()]

    @staticmethod
    def rows_of(options: dict[str, Any]) -> tuple[int, ...]:
        """Returns bytes of a token's row in each of a layer's buffers. options: of the constructor."""
        raise NotImplementedError

    def row_bytes(self) -> tuple[int, ...]:
        """Returns bytes of a token in one layer: of K and of V, or of the latent row."""
        return self._row_bytes

    def _aliased(self, buffer: int) -> list[torch.Tensor]:
        """Returns one of the buffers of each layer, [slots, elements]."""
        row_bytes = self.row_bytes()[buffer]
        own, shared = self.first_scratch_slot * row_bytes, self.scratch_tokens * row_bytes
        memory = device_of(self.device).aliased_memory(self.layer_num, own, shared)
        self._memory.append(memory)
        elements = row_bytes // self.store_dtype.itemsize
        return [flat.view(self.store_dtype).view(-1, elements) for flat in memory.tensors]


class SuffixKVPool(_SuffixPool, MHATokenToKVPool):  # type: ignore[misc]
    """Raises AliasedMemoryError for another KV layout than "nhd"."""

    def __init__(self, durable_tokens: int, scratch_tokens: int, **options: Any) -> None:
        super().__init__(durable_tokens, scratch_tokens, enable_alt_stream=False, **options)

    @staticmethod
    def rows_of(options: dict[str, Any]) -> tuple[int, ...]:
        head_bytes = options["head_num"] * options["dtype"].itemsize
        return options["head_dim"] * head_bytes, (options.get("v_head_dim") or options["head_dim"]) * head_bytes

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Returns (K, V) bytes of physical memory."""
        key, value = self._bytes_of_buffers()
        return key, value

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd":
            raise AliasedMemoryError(
                f"--suffix-kv evict needs the KV cache layout nhd, and this is {self.kv_cache_layout}:"
                " start with --suffix-kv keep"
            )
        self.k_buffer = [rows.view(-1, self.head_num, self.head_dim) for rows in self._aliased(0)]
        self.v_buffer = [rows.view(-1, self.head_num, self.v_head_dim) for rows in self._aliased(1)]


class SuffixLatentPool(_SuffixPool, MLATokenToKVPool):  # type: ignore[misc]
    @staticmethod
    def rows_of(options: dict[str, Any]) -> tuple[int, ...]:
        return ((options["kv_lora_rank"] + options["qk_rope_head_dim"]) * options["dtype"].itemsize,)

    def get_kv_size_bytes(self) -> int:
        return self._bytes_of_buffers()[0]

    def _create_buffers(self) -> None:
        self.kv_buffer = [rows.unsqueeze(1) for rows in self._aliased(0)]


def _slots_per_granule(device: str, page_size: int, row_bytes: tuple[int, ...]) -> int:
    """Smallest number of slots, in whole pages, whose rows fill whole granules in each buffer."""
    granule = device_of(device).granularity_bytes()
    return math.lcm(page_size, *(granule // math.gcd(granule, one) for one in row_bytes))
