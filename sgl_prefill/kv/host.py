"""Buffers in host memory whose tails are one and the same physical memory.

    buffer 0:   own memory | shared memory
    buffer 1:   own memory | the same shared memory
    ...

Own memory is anonymous and committed by the kernel page by page on first use; shared memory is a memfd, mapped behind each
buffer's own part. A write to one tail is visible in all.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from sgl_prefill.errors import AliasedMemoryError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # not in Python's mmap module; Linux on x86-64 and arm64
GRANULARITY_BYTES = mmap.PAGESIZE


class AliasedHostMemory:
    """`n_buffers` buffers of `own_bytes` + `shared_bytes` each, both multiples of GRANULARITY_BYTES.

    Raises AliasedMemoryError where the system refuses, with everything undone. `close` unmaps; tensors made from the
    buffers must not be touched after it.
    """

    def __init__(self, n_buffers: int, own_bytes: int, shared_bytes: int) -> None:
        assert own_bytes % GRANULARITY_BYTES == 0, own_bytes
        assert shared_bytes % GRANULARITY_BYTES == 0, shared_bytes
        assert shared_bytes > 0
        self._n_bytes = own_bytes + shared_bytes
        self._addresses: list[int] = []
        self._fd = -1
        try:
            self._fd = os.memfd_create("sgl_prefill-suffix-kv", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, shared_bytes)
            for _ in range(n_buffers):
                base = _map(None, self._n_bytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
                self._addresses.append(base)
                _map(base + own_bytes, shared_bytes, self._fd, mmap.MAP_SHARED | _MAP_FIXED)
        except OSError as error:
            self.close()
            raise AliasedMemoryError(
                f"host memory for {n_buffers} KV buffers of {own_bytes} bytes and {shared_bytes} shared bytes cannot be"
                f" reserved ({error.strerror}): lower --memory-budget-gb or --max-input-length, or raise"
                " `ulimit -v` and /proc/sys/vm/max_map_count"
            ) from error
        self.tensors = [self._as_tensor(address) for address in self._addresses]

    backed_bytes = rounding_bytes = 0  # the kernel commits on first use, and counts by itself

    def commit_own(self, n_bytes: int) -> None:
        """Nothing to do on a host, as in the next two: the kernel commits zeros on first use."""

    def commit_shared(self, n_bytes: int) -> None: ...

    def release_shared(self) -> None: ...

    def close(self) -> None:
        """Frees all memory; idempotent."""
        for address in self._addresses:
            _libc.munmap(address, self._n_bytes)
        self._addresses = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _as_tensor(self, address: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * self._n_bytes).from_address(address), dtype=torch.uint8)


def _map(address: int | None, n_bytes: int, fd: int, flags: int) -> int:
    result: int | None = _libc.mmap(address, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
