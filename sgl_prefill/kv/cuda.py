"""Buffers in CUDA memory whose tails are one and the same physical memory: the counterpart of `host.py`.

    buffer i:   own memory as far as it is committed | gap, never touched | shared memory, as far as it is committed | gap
                0 ................. committed_own .... own_bytes ............ own_bytes + committed_shared ........ n_bytes

An address range is reserved for each buffer at its full size; physical memory is committed once the plan is known
(`commit_own`, `commit_shared`). The driver's virtual memory calls are those of `cuda-python`.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, NamedTuple

import torch

from sgl_prefill.errors import AliasedMemoryError, NoMemoryLeftError

logger = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """Physical memory, and where it is mapped."""

    handle: Any
    n_bytes: int
    addresses: list[int]


class AliasedCudaMemory:
    """`n_buffers` buffers of `own_bytes` + `shared_bytes` each on one device, multiples of `granularity_bytes(device)`.

    Only one granule of each buffer has memory at first. Raises AliasedMemoryError with the driver's error where it refuses,
    NoMemoryLeftError where it has no more memory; what was made by the call that raises is undone.
    """

    def __init__(self, n_buffers: int, own_bytes: int, shared_bytes: int, device_index: int) -> None:
        self._driver = _driver()
        self._device_index = device_index
        self._granularity_bytes = granularity_bytes(device_index)
        assert own_bytes % self._granularity_bytes == 0, (own_bytes, self._granularity_bytes)
        assert shared_bytes % self._granularity_bytes == 0, (shared_bytes, self._granularity_bytes)
        self._own_bytes, self._shared_bytes = own_bytes, shared_bytes
        self._n_bytes = own_bytes + shared_bytes
        self._committed_own = self._committed_shared = 0  # bytes of each buffer
        self._addresses: list[int] = []
        self._own: list[_Piece] = []
        self._shared: list[_Piece] = []
        try:
            for _ in range(n_buffers):
                address = self._call("cuMemAddressReserve", self._n_bytes, self._granularity_bytes, 0, 0)
                self._addresses.append(int(address))
            first = min(self._granularity_bytes, own_bytes)
            self._back_own(first)  # torch asks the driver whose memory an address is: it must have some
            self.tensors = [self._as_tensor(address) for address in self._addresses]
            self._zero(self.tensors, 0, first)
        except BaseException:
            self.close()
            raise

    @property
    def backed_bytes(self) -> int:
        """Physical memory in bytes."""
        return sum(piece.n_bytes for piece in (*self._own, *self._shared))

    @property
    def rounding_bytes(self) -> int:
        """Upper bound in bytes of what rounding adds to one `commit_own` and one `commit_shared`."""
        return (len(self._addresses) + 1) * self._granularity_bytes

    def commit_own(self, n_bytes: int) -> None:
        """Backs the first `n_bytes` of every buffer with zeroed memory, rounded up to the granularity; never shrinks."""
        start, end = self._committed_own, min(self._rounded(n_bytes), self._own_bytes)
        if end > start:
            self._back_own(end)
            self._zero(self.tensors, start, end)

    def commit_shared(self, n_bytes: int) -> None:
        """Backs the first `n_bytes` behind every buffer's own part with the same zeroed memory; as `commit_own`."""
        start, end = self._committed_shared, min(self._rounded(n_bytes), self._shared_bytes)
        if end > start:
            self._shared += self._backed(
                [[address + self._own_bytes + start for address in self._addresses]], end - start
            )
            self._committed_shared = end
            self._zero(self.tensors[:1], self._own_bytes + start, self._own_bytes + end)

    def release_shared(self) -> None:
        """Frees the memory of the tail. No kernel that uses it may be running."""
        _synchronize(self._device_index)
        pieces, self._shared, self._committed_shared = self._shared, [], 0
        _report(self._free(pieces))

    def close(self) -> None:
        """Frees all memory; idempotent. No kernel that uses it may be running.

        Where the driver refuses a call, the others are made all the same; the rest is freed with the process.
        """
        if not self._addresses:
            return
        try:
            _synchronize(self._device_index)
        except RuntimeError as error:  # the device has failed before: its memory is to be given back all the same
            logger.warning("the device has not ended its work before its KV memory is given back: %s", error)
        refused = self._free([*self._own, *self._shared])
        for address in self._addresses:
            refused += self._tried("cuMemAddressFree", address, self._n_bytes)
        self._own, self._shared, self._addresses = [], [], []
        self._committed_own = self._committed_shared = 0
        _report(refused)

    def _back_own(self, end: int) -> None:
        start = self._committed_own
        self._own += self._backed([[address + start] for address in self._addresses], end - start)
        self._committed_own = end

    def _zero(self, tensors: list[torch.Tensor], start: int, end: int) -> None:
        """New memory may hold NaN, and attention reads rows that no request has written with weight 0: 0 x NaN is NaN."""
        for tensor in tensors:
            tensor[start:end].zero_()
        _synchronize(self._device_index)  # whichever stream uses it first

    def _rounded(self, n_bytes: int) -> int:
        return -(-n_bytes // self._granularity_bytes) * self._granularity_bytes

    def _backed(self, targets: list[list[int]], n_bytes: int) -> list[_Piece]:
        """Creates one piece of memory per list of addresses and maps it there; all or nothing."""
        made: list[_Piece] = []
        try:
            for addresses in targets:
                piece = _Piece(self._create(n_bytes), n_bytes, [])
                made.append(piece)
                for address in addresses:
                    self._call("cuMemMap", address, n_bytes, 0, piece.handle, 0)
                    piece.addresses.append(address)
                    self._allow(address, n_bytes)
        except AliasedMemoryError:
            _report(self._free(made))
            raise
        return made

    def _create(self, n_bytes: int) -> Any:
        return self._call("cuMemCreate", n_bytes, _properties(self._driver, self._device_index), 0)

    def _allow(self, address: int, n_bytes: int) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device_index
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, n_bytes, [access], 1)

    def _free(self, pieces: list[_Piece]) -> list[AliasedMemoryError]:
        """Returns what was refused."""
        refused: list[AliasedMemoryError] = []
        for piece in pieces:
            for address in piece.addresses:
                refused += self._tried("cuMemUnmap", address, piece.n_bytes)
            refused += self._tried("cuMemRelease", piece.handle)
        return refused

    def _tried(self, name: str, *arguments: Any) -> list[AliasedMemoryError]:
        try:
            self._call(name, *arguments)
        except AliasedMemoryError as error:
            return [error]
        return []

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._driver, name, *arguments)

    def _as_tensor(self, address: int) -> torch.Tensor:
        return torch.as_tensor(_CudaBytes(address, self._n_bytes), device=f"cuda:{self._device_index}")


class _CudaBytes:
    """`__cuda_array_interface__` of memory that torch did not allocate."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def granularity_bytes(device_index: int) -> int:
    """Returns the granularity of sizes and addresses in bytes, as the driver says (2 MiB on current cards)."""
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


def _synchronize(device_index: int) -> None:
    torch.cuda.synchronize(device_index)


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
        kind = NoMemoryLeftError if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else AliasedMemoryError
        raise kind(
            f"{name}({shown}) failed with {error}: lower --mem-fraction-static or --max-input-length,"
            " or start with --suffix-kv keep"
        )
    return results[0] if results else None


def _report(refused: list[AliasedMemoryError]) -> None:
    if refused:
        logger.warning("KV memory goes with this process, since %d calls were refused: %s", len(refused), refused[0])
