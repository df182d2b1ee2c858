"""Buffers in CUDA memory whose tails are one and the same physical memory: the counterpart of `host.py`.

    buffer i:   own handles, mapped as they are committed | gap, never touched | the one shared handle

An address range is reserved for each buffer at its full size; physical memory comes later (`commit_own`), once the profile
run has shown how much is left. The driver's virtual memory calls are those of `cuda-python`.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from sgl_prefill.errors import AliasedMemoryError


class AliasedCudaMemory:
    """`n_buffers` buffers of `own_bytes` + `shared_bytes` each on one device, multiples of `granularity_bytes(device)`.

    Only the shared tails and one granule of each buffer have memory at first. Raises AliasedMemoryError with the
    driver's error where it refuses, with everything undone.
    """

    def __init__(self, n_buffers: int, own_bytes: int, shared_bytes: int, device_index: int) -> None:
        self._driver = _driver()
        self._device_index = device_index
        self._granularity_bytes = granularity_bytes(device_index)
        assert own_bytes % self._granularity_bytes == 0, (own_bytes, self._granularity_bytes)
        assert shared_bytes % self._granularity_bytes == 0, (shared_bytes, self._granularity_bytes)
        self._own_bytes = own_bytes
        self._n_bytes = own_bytes + shared_bytes
        self._committed_bytes = 0
        self._addresses: list[int] = []
        self._mapped: list[tuple[int, int]] = []  # (address, bytes)
        self._handles: list[Any] = []
        try:
            shared = self._create(shared_bytes)
            for _ in range(n_buffers):
                address = self._call("cuMemAddressReserve", self._n_bytes, self._granularity_bytes, 0, 0)
                self._addresses.append(int(address))
                self._map(int(address) + own_bytes, shared_bytes, shared)
            self.commit_own(min(self._granularity_bytes, own_bytes))
        except AliasedMemoryError:
            self.close()
            raise
        self.tensors = [self._as_tensor(address) for address in self._addresses]

    def commit_own(self, n_bytes: int) -> None:
        """Back the first `n_bytes` of every buffer with memory, rounded up to the granularity; never takes any back."""
        target = min(-(-n_bytes // self._granularity_bytes) * self._granularity_bytes, self._own_bytes)
        missing = target - self._committed_bytes
        if missing <= 0:
            return
        for address in self._addresses:
            self._map(address + self._committed_bytes, missing, self._create(missing))
        self._committed_bytes = target

    def close(self) -> None:
        """Gives all memory back; idempotent. A driver that is shutting down may refuse; its memory goes with the process."""
        with contextlib.suppress(AliasedMemoryError):
            for address, n_bytes in self._mapped:
                self._call("cuMemUnmap", address, n_bytes)
            for handle in self._handles:
                self._call("cuMemRelease", handle)
            for address in self._addresses:
                self._call("cuMemAddressFree", address, self._n_bytes)
        self._mapped, self._handles, self._addresses = [], [], []

    def _create(self, n_bytes: int) -> Any:
        handle = self._call("cuMemCreate", n_bytes, _properties(self._driver, self._device_index), 0)
        self._handles.append(handle)
        return handle

    def _map(self, address: int, n_bytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, n_bytes, 0, handle, 0)
        self._mapped.append((address, n_bytes))
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device_index
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, n_bytes, [access], 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._driver, name, *arguments)

    def _as_tensor(self, address: int) -> torch.Tensor:
        return torch.as_tensor(_CudaBytes(address, self._n_bytes), device=f"cuda:{self._device_index}")


class _CudaBytes:
    """What torch needs to make a tensor of memory that it did not allocate."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def granularity_bytes(device_index: int) -> int:
    """Returns what sizes and addresses must be multiples of: 2 MiB on the cards of today, but the driver says."""
    driver = _driver()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver, "cuMemGetAllocationGranularity", _properties(driver, device_index), minimum))


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise AliasedMemoryError(
            "--suffix-kv evict on CUDA needs the package cuda-python, which SGLang brings along:"
            " install it, or start with --suffix-kv keep"
        ) from error


def _properties(driver: Any, device_index: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device_index
    return properties


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Returns the one result of a call of the driver, or None. Raises AliasedMemoryError with its error and the arguments."""
    error, *results = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        shown = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
        raise AliasedMemoryError(
            f"{name}({shown}) failed with {error}: lower --mem-fraction-static or --max-input-length,"
            " or start with --suffix-kv keep"
        )
    return results[0] if results else None
