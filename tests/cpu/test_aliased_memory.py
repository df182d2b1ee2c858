"""Buffers whose tails are one memory, and what happens where the system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_prefill.errors import AliasedMemoryError
from sgl_prefill.kv import host
from sgl_prefill.kv.host import GRANULARITY_BYTES, AliasedHostMemory
from sgl_prefill.port.kv.pool import SuffixKVPool


def mappings() -> int:
    """Address ranges of this process that map the scratch of a pool."""
    return Path("/proc/self/maps").read_text().count("sgl_prefill-suffix-kv")


def test_tails_are_shared_and_the_rest_is_not() -> None:
    """What one buffer's tail is given, all read; own parts start as zeros and stay apart."""
    own, shared = 3 * GRANULARITY_BYTES, 2 * GRANULARITY_BYTES
    memory = AliasedHostMemory(4, own, shared)
    try:
        first, *others = memory.tensors
        first[:] = 7
        for other in others:
            assert other[own:].eq(7).all()
            assert other[:own].eq(0).all()
        others[0][own + 5] = 9
        assert int(first[own + 5]) == 9
    finally:
        memory.close()
        memory.close()
    assert mappings() == 0


def test_a_mapping_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth of eight mmap calls fails: everything is unmapped, the file is closed, and the message names a remedy."""
    calls = []
    real = host._map

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*arguments)

    monkeypatch.setattr(host, "_map", failing)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AliasedMemoryError, match=r"Cannot allocate memory.*--memory-budget-gb"):
        AliasedHostMemory(4, GRANULARITY_BYTES, GRANULARITY_BYTES)
    assert mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_memory_that_cannot_be_reserved_is_an_error_with_the_sizes() -> None:
    """More address space than there is."""
    with pytest.raises(AliasedMemoryError, match=r"of 1152921504606846976 bytes"):
        AliasedHostMemory(1, 1 << 60, GRANULARITY_BYTES)


def make_pool(**changes: Any) -> SuffixKVPool:
    options = {
        "page_size": 4,
        "dtype": torch.bfloat16,
        "head_num": 3,
        "head_dim": 24,
        "v_head_dim": 16,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return SuffixKVPool(durable_tokens=100, scratch_tokens=70, **{**options, **changes})


def test_the_pool_rounds_up_to_pages_and_granules_and_shares_scratch_between_layers() -> None:
    """Heads of 24 and 16 dimensions: neither row size divides the mapping granularity."""
    pool = make_pool()
    assert pool.durable_tokens >= 100
    assert pool.scratch_tokens >= 70
    assert pool.first_scratch_slot == 4 + pool.durable_tokens
    for buffers in (pool.k_buffer, pool.v_buffer):
        assert buffers[0].shape[0] == pool.first_scratch_slot + pool.scratch_tokens
        buffers[2][pool.first_scratch_slot :] = 5.0
        buffers[2][: pool.first_scratch_slot] = 3.0
        assert buffers[0][pool.first_scratch_slot :].eq(5.0).all()
        assert buffers[0][: pool.first_scratch_slot].eq(0.0).all()
    keys, values = pool.get_kv_size_bytes()
    assert keys == (3 * pool.first_scratch_slot + pool.scratch_tokens) * 3 * 24 * 2, "scratch counts once"
    assert values < keys
    pool.close()


def test_a_pool_in_another_layout_is_refused() -> None:
    """Scratch is a tail of slots; a layout that folds heads into pages has none."""
    with pytest.raises(AliasedMemoryError, match="--suffix-kv keep"):
        make_pool(kv_cache_layout="vectorized_5d")
