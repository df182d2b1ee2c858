"""A CUDA card without a card: the driver's virtual memory calls over host memory that is really mapped, and really shared.

It keeps the books that a driver keeps (granularity, reservations, handles, mappings, what is free), hands out memory full of
0xFF, which is NaN in every format of floating-point numbers, and refuses what a driver refuses. What has no memory behind it
cannot be read: who tries ends with a signal, as a kernel would with an illegal access.
"""
# ruff: noqa: N802  (the driver's names)

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch

from sgl_prefill.kv import cuda, host
from sgl_prefill.startup.device import Accelerator

GRANULE_BYTES = 64 << 10  # small, so that small tests have many
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_MAPPED = 0, 1, 2, 211
UNINITIALISED = b"\xff"
_PROT_NONE = 0  # not in Python's mmap module


class _Mapping(NamedTuple):
    handle: int
    n_bytes: int


class FakeCard:
    """Memory of `total_bytes`, of which others hold `held_bytes`. `calls` counts the driver's; the `fail_at`-th that could be
    refused for lack of memory is refused.
    """

    CUresult = SimpleNamespace(
        CUDA_SUCCESS=SUCCESS, CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE=INVALID_VALUE
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, total_bytes: int, *, held_bytes: int = 0, fail_at: int | None = None) -> None:
        self.total_bytes, self.held_bytes = total_bytes, held_bytes
        self.fail_at = fail_at
        self.refuses: set[str] = set()  # names of calls that fail as those of a driver that shuts down
        self.n_allocations = 0
        self._numbers = itertools.count(1)
        self.calls: list[str] = []
        self.reservations: dict[int, int] = {}
        self.handles: dict[int, tuple[int, int]] = {}  # (file, bytes)
        self.released: set[int] = set()  # handles that live on while they are mapped
        self.mappings: dict[int, _Mapping] = {}
        self.cached_bytes = 0  # that torch's allocator holds and does not use
        self.is_busy = False  # a kernel may read what is mapped until somebody synchronises

    @property
    def free_bytes(self) -> int:
        in_use = sum(n_bytes for _, n_bytes in self.handles.values())
        return self.total_bytes - self.held_bytes - self.cached_bytes - in_use

    @property
    def is_empty(self) -> bool:
        """Tells whether nothing is mapped, held or reserved."""
        return not self.mappings and not self.handles and not self.reservations

    def can_allocate(self, n_bytes: int) -> bool:
        """Tells whether there is memory for an allocation, of the driver's or of torch's, and counts it."""
        self.n_allocations += 1
        return self.n_allocations != self.fail_at and n_bytes <= self.free_bytes

    # The driver's calls, with their arguments. Each returns an error and its results.

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[int, int]:
        return SUCCESS, GRANULE_BYTES

    def cuMemAddressReserve(self, n_bytes: int, alignment: int, address: int, flags: int) -> tuple[int, ...]:
        if n_bytes <= 0 or n_bytes % GRANULE_BYTES or alignment % GRANULE_BYTES:
            return self._done("cuMemAddressReserve", INVALID_VALUE)
        if not self.can_allocate(0):
            return self._done("cuMemAddressReserve", OUT_OF_MEMORY)
        base = host._map(None, n_bytes + GRANULE_BYTES, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | host._MAP_NORESERVE)
        start = -(-base // GRANULE_BYTES) * GRANULE_BYTES
        host._libc.munmap(base, start - base)
        host._libc.munmap(start + n_bytes, base + GRANULE_BYTES - start)
        _forbid(start, n_bytes)
        self.reservations[start] = n_bytes
        return self._done("cuMemAddressReserve", SUCCESS, start)

    def cuMemAddressFree(self, address: int, n_bytes: int) -> tuple[int, ...]:
        inside = any(address <= at < address + n_bytes for at in self.mappings)
        if self.reservations.get(address) != n_bytes or inside:
            return self._done("cuMemAddressFree", INVALID_VALUE)
        if (answer := self._done("cuMemAddressFree", SUCCESS))[0] == SUCCESS:
            del self.reservations[address]
            host._libc.munmap(address, n_bytes)
        return answer

    def cuMemCreate(self, n_bytes: int, properties: Any, flags: int) -> tuple[int, ...]:
        if n_bytes <= 0 or n_bytes % GRANULE_BYTES or "cuMemCreate" in self.refuses:
            return self._done("cuMemCreate", INVALID_VALUE)
        if not self.can_allocate(n_bytes):
            return self._done("cuMemCreate", OUT_OF_MEMORY)
        file = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.write(file, UNINITIALISED * n_bytes)
        handle = next(self._numbers)
        self.handles[handle] = (file, n_bytes)
        return self._done("cuMemCreate", SUCCESS, handle)

    def cuMemRelease(self, handle: int) -> tuple[int, ...]:
        if handle not in self.handles or handle in self.released:
            return self._done("cuMemRelease", INVALID_VALUE)
        if (answer := self._done("cuMemRelease", SUCCESS))[0] == SUCCESS:
            self.released.add(handle)
            self._forget_unused(handle)
        return answer

    def cuMemMap(self, address: int, n_bytes: int, offset: int, handle: int, flags: int) -> tuple[int, ...]:
        within = any(start <= address and address + n_bytes <= start + n for start, n in self.reservations.items())
        overlaps = any(at < address + n_bytes and address < at + other.n_bytes for at, other in self.mappings.items())
        is_live = handle in self.handles and handle not in self.released
        sizes_fit = is_live and offset == 0 and n_bytes == self.handles[handle][1]
        if not within or overlaps or not sizes_fit or address % GRANULE_BYTES:
            return self._done("cuMemMap", INVALID_VALUE)
        if not self.can_allocate(0):
            return self._done("cuMemMap", OUT_OF_MEMORY)
        self.mappings[address] = _Mapping(handle, n_bytes)
        return self._done("cuMemMap", SUCCESS)

    def cuMemSetAccess(self, address: int, n_bytes: int, access: list[Any], count: int) -> tuple[int, ...]:
        mapped = self.mappings.get(address)
        if mapped is None or mapped.n_bytes != n_bytes or count != len(access):
            return self._done("cuMemSetAccess", INVALID_VALUE)
        if not self.can_allocate(0):
            return self._done("cuMemSetAccess", OUT_OF_MEMORY)
        file, _ = self.handles[mapped.handle]
        host._map(address, n_bytes, file, mmap.MAP_SHARED | host._MAP_FIXED)
        return self._done("cuMemSetAccess", SUCCESS)

    def cuMemUnmap(self, address: int, n_bytes: int) -> tuple[int, ...]:
        mapped = self.mappings.get(address)
        if mapped is None or mapped.n_bytes != n_bytes:
            return self._done("cuMemUnmap", NOT_MAPPED)
        assert not self.is_busy, "a kernel may still read this memory"
        if (answer := self._done("cuMemUnmap", SUCCESS))[0] == SUCCESS:
            _forbid(address, n_bytes)
            del self.mappings[address]
            self._forget_unused(mapped.handle)
        return answer

    def _forget_unused(self, handle: int) -> None:
        if handle in self.released and all(mapped.handle != handle for mapped in self.mappings.values()):
            file, _ = self.handles.pop(handle)
            self.released.discard(handle)
            os.close(file)

    def _done(self, name: str, error: int, *results: int) -> tuple[int, ...]:
        self.calls.append(name)
        return (INVALID_VALUE,) if name in self.refuses else (error, *results)

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.is_busy = False

    def tensor(self, address: int, n_bytes: int) -> torch.Tensor:
        """As torch: it asks the driver whose memory an address is, and takes one without memory for the host's."""
        assert address in self.mappings, "the pointer is not registered with any CUDA device"
        return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8)


def _forbid(address: int, n_bytes: int) -> None:
    """Maps nothing that may be read."""
    result = host._libc.mmap(
        address,
        n_bytes,
        _PROT_NONE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | host._MAP_FIXED | host._MAP_NORESERVE,
        -1,
        0,
    )
    assert result == address, "the fake card cannot map memory"


class FakeDevice(Accelerator):
    """A GPU whose tensors lie in host memory. Its card serves all of them."""

    card: ClassVar[FakeCard]
    peak_bytes_of: ClassVar[Callable[[Callable[[], None]], int]] = staticmethod(lambda run: 0)

    def model(self) -> str:
        return "Fake GPU"

    def free_bytes(self) -> int:
        return self.card.free_bytes

    def total_bytes(self) -> int:
        return self.card.total_bytes

    @property
    def _index(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.card.synchronize()

    def release_unused(self) -> None:
        self.card.cached_bytes = 0

    def peak_bytes(self, run: Callable[[], None]) -> int:
        return type(self).peak_bytes_of(run)

    def time_ms(self, run: Callable[[], Any]) -> float:
        run()
        return 1.0


@contextmanager
def installed(card: FakeCard) -> Iterator[FakeCard]:
    """Lets this card serve `kv.cuda`, and every device be a `FakeDevice`, while the block runs."""
    FakeDevice.card = card
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("sgl_prefill.")]
    with ExitStack() as patches:
        changes: tuple[Any, ...] = (
            mock.patch.object(cuda, "_driver", return_value=card),
            mock.patch.object(cuda, "_synchronize", side_effect=lambda index: card.synchronize()),
            mock.patch.object(
                cuda.AliasedCudaMemory, "_as_tensor", lambda self, address: card.tensor(address, self._n_bytes)
            ),
            *(mock.patch.object(module, "device_of", FakeDevice) for module in ours if "device_of" in vars(module)),
        )
        for change in changes:
            patches.enter_context(change)
        yield card
