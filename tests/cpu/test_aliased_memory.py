"""Buffers whose tails are one memory, and what happens where the system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefill.errors import AliasedMemoryError
from sgl_prefill.kv import cuda, host
from sgl_prefill.kv.host import GRANULARITY_BYTES, AliasedHostMemory
from sgl_prefill.port.kv_pool import SuffixKVPool


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


class FakeDriver:
    """Records the calls of the CUDA driver and fails one of them; there is no device here."""

    def __init__(self, fail_at: str = "", after: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self._fail_at, self._after = fail_at, after
        self._next_address = 1 << 30

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            return _Anything()

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self._fail_at and sum(call[0] == name for call in self.calls) > self._after:
                return ("CUDA_ERROR_OUT_OF_MEMORY",)
            if name == "cuMemAddressReserve":
                self._next_address += arguments[0]
                return 0, self._next_address
            return {"cuMemGetAllocationGranularity": (0, 2 << 20), "cuMemCreate": (0, object())}.get(name, (0,))

        return call

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __call__(self, *_: Any) -> Any:
        return SimpleNamespace(location=SimpleNamespace())


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.AliasedCudaMemory, "_as_tensor", lambda self, address: address)


@pytest.mark.usefixtures("no_device")
def test_on_cuda_one_handle_is_mapped_behind_every_buffer_and_own_memory_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls that the driver gets, in sizes of its granularity of 2 MiB; nothing ran on a device here."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    granule = 2 << 20
    memory = cuda.AliasedCudaMemory(3, 8 * granule, 4 * granule, 0)
    maps = [call for call in driver.calls if call[0] == "cuMemMap"]
    tails = [call for call in maps if call[2] == 4 * granule]
    assert len(tails) == 3
    assert len({id(call[4]) for call in tails}) == 1, "one physical memory behind all buffers"
    assert [call[1] for call in tails] == [address + 8 * granule for address in memory.tensors]
    memory.commit_own(5 * granule - 1)
    memory.commit_own(5 * granule)
    grown = [call for call in driver.calls if call[0] == "cuMemMap"][len(maps) :]
    assert [(call[1], call[2]) for call in grown] == [(address + granule, 4 * granule) for address in memory.tensors]
    memory.close()
    assert driver.count("cuMemUnmap") == driver.count("cuMemMap")
    assert driver.count("cuMemRelease") == driver.count("cuMemCreate")
    assert driver.count("cuMemAddressFree") == 3


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("name", "after"), [("cuMemCreate", 0), ("cuMemCreate", 2), ("cuMemMap", 2), ("cuMemSetAccess", 4)]
)
def test_a_driver_that_refuses_is_quoted_and_everything_is_undone(
    monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    """Each mapping and each handle made before the failure is given back."""
    driver = FakeDriver(name, after)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    with pytest.raises(AliasedMemoryError, match=rf"{name}.*CUDA_ERROR_OUT_OF_MEMORY.*--suffix-kv keep"):
        cuda.AliasedCudaMemory(3, 8 << 20, 4 << 20, 0)
    assert driver.count("cuMemAddressFree") == driver.count("cuMemAddressReserve")
    failed_creates = int(name == "cuMemCreate")
    assert driver.count("cuMemRelease") == driver.count("cuMemCreate") - failed_creates
