"""Where the model runs, and what differs by that: memory, its mapping, what a start measures, timing, the logits' type."""

from __future__ import annotations

import abc
import ctypes
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import psutil
import torch

from sgl_prefill.cpu.detect import has_accelerator
from sgl_prefill.errors import NoMemoryLeftError
from sgl_prefill.startup.resident_memory import PeakWatch, anonymous_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLE_INTERVAL_S = 0.0005
# Plain RuntimeErrors: of PyTorch's CPU allocator, of a kernel that cannot be loaded or run (PyTorch, Triton), of cuBLAS.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class AliasedMemory(Protocol):
    """Buffers whose tails are one and the same physical memory (see `kv`)."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the buffers as tensors, uint8."""
        ...

    @property
    def backed_bytes(self) -> int:
        """Counts the physical memory behind them that a plan has to know of."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """Returns how much more than what they are asked for the two below may take, together."""
        ...

    def commit_own(self, n_bytes: int) -> None:
        """Back the first `n_bytes` of each buffer with zeros. Raises AliasedMemoryError."""
        ...

    def commit_shared(self, n_bytes: int) -> None:
        """Back the first `n_bytes` of the tail with zeros. Raises AliasedMemoryError."""
        ...

    def release_shared(self) -> None:
        """Take the tail's memory back."""
        ...

    def close(self) -> None: ...


class Device(abc.ABC):
    """`device_of` makes one from the name that torch gives it, `this_device` that of this machine."""

    is_host: ClassVar[bool]
    chunk_candidates: ClassVar[tuple[int, ...]]  # tokens of a chunk of hybrid prefilling, among which a start chooses
    budget_flag: ClassVar[str]  # with which a user gives the engine more memory
    budget_holds_activations: ClassVar[bool]  # besides the KV pool; else SGLang has set memory aside for them
    backs_on_use: ClassVar[bool]  # aliased memory: the system, as it is written; else what was committed, and no more
    extrapolates_memory: ClassVar[
        bool
    ]  # a start measures short inputs, a line tells of longer ones; else the longest runs
    has_native_kernels: ClassVar[bool]
    # Of a measurement of short computations: rounds that pay for what comes once, and rounds that count whatever they take.
    warm_up_rounds: ClassVar[int]
    fewest_rounds: ClassVar[int]

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def model(self) -> str:
        """Names the processor or the card: what was measured on another is not to be used here."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Free device memory in bytes: not allocated by any process, including this one."""

    @abc.abstractmethod
    def total_bytes(self) -> int:
        """Counts all memory."""

    @abc.abstractmethod
    def granularity_bytes(self) -> int:
        """Returns what sizes of aliased memory must be multiples of."""

    @abc.abstractmethod
    def aliased_memory(self, n_buffers: int, own_bytes: int, shared_bytes: int) -> AliasedMemory:
        """Makes `n_buffers` buffers with tails in common. Raises AliasedMemoryError."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was started has been done."""

    @abc.abstractmethod
    def release_unused(self) -> None:
        """Give memory back that nothing uses."""

    @abc.abstractmethod
    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Measures the peak memory of `run` above what is there before it. It may be run more than once."""

    def time_ms(self, run: Callable[[], Any]) -> float:
        """Measures the milliseconds that `run` takes, and all that it starts."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return 1000 * (time.perf_counter() - started)


class Host(Device):
    """A machine without an accelerator."""

    is_host = True
    chunk_candidates = (256, 512, 1024, 2048)
    budget_flag = "--memory-budget-gb"
    budget_holds_activations = True
    backs_on_use = True
    extrapolates_memory = True
    has_native_kernels = True
    warm_up_rounds, fewest_rounds = 0, 2

    def model(self) -> str:
        return _processor()

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def total_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def granularity_bytes(self) -> int:
        from sgl_prefill.kv.host import GRANULARITY_BYTES

        return GRANULARITY_BYTES

    def aliased_memory(self, n_buffers: int, own_bytes: int, shared_bytes: int) -> AliasedMemory:
        from sgl_prefill.kv.host import AliasedHostMemory

        return AliasedHostMemory(n_buffers, own_bytes, shared_bytes)

    def synchronize(self) -> None:
        """Returns at once: there is nothing to wait for."""

    def release_unused(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()  # pays for what stays: KV slots, threads, kernels, caches
        self.release_unused()
        # Anonymous memory alone: suffix scratch is one piece that is mapped many times, and the kernel would count each.
        with PeakWatch(anonymous_bytes, anonymous_bytes(), SAMPLE_INTERVAL_S) as watch:
            run()
        return watch.peak_bytes


class Accelerator(Device):
    """A GPU."""

    is_host = False
    chunk_candidates = (1024, 2048, 4096, 8192)
    budget_flag = "--mem-fraction-static"
    budget_holds_activations = False
    backs_on_use = False
    extrapolates_memory = False
    has_native_kernels = False
    warm_up_rounds, fewest_rounds = 3, 5  # kernels compile at first use, and clocks are low

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.name)

    @property
    def _index(self) -> int:
        index = torch.device(self.name).index
        return torch.cuda.current_device() if index is None else index

    def model(self) -> str:
        return str(self._module.get_device_name(self._index))

    def free_bytes(self) -> int:
        return int(self._module.mem_get_info(self._index)[0])

    def total_bytes(self) -> int:
        return int(self._module.mem_get_info(self._index)[1])

    def granularity_bytes(self) -> int:
        from sgl_prefill.kv import cuda

        return cuda.granularity_bytes(self._index)

    def aliased_memory(self, n_buffers: int, own_bytes: int, shared_bytes: int) -> AliasedMemory:
        from sgl_prefill.kv.cuda import AliasedCudaMemory

        return AliasedCudaMemory(n_buffers, own_bytes, shared_bytes, self._index)

    def synchronize(self) -> None:
        self._module.synchronize()

    def release_unused(self) -> None:
        self._module.empty_cache()

    def peak_bytes(self, run: Callable[[], None]) -> int:
        self.synchronize()
        self.release_unused()
        self._module.reset_peak_memory_stats()
        before = self._module.memory_allocated()
        run()
        self.synchronize()
        return int(self._module.max_memory_allocated() - before)

    def time_ms(self, run: Callable[[], Any]) -> float:
        """Measures by the device's own clock: what it does takes milliseconds, and this thread may be late by one."""
        started, ended = (self._module.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        started.record()
        run()
        ended.record()
        self.synchronize()
        return float(started.elapsed_time(ended))


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether it says that this machine or its device has no memory left."""
    if isinstance(error, (MemoryError, NoMemoryLeftError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def device_of(name: str) -> Device:
    """Makes the object of a device. name: as torch writes it, "cpu" or "cuda:0"."""
    return Host(name) if torch.device(name).type == "cpu" else Accelerator(name)


def this_device() -> Device:
    """Makes the one of this machine, as far as one can tell without SGLang."""
    return Accelerator("cuda") if has_accelerator() else Host("cpu")


def _processor() -> str:
    """Returns the name by which the processor calls itself, with what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    by_name = {name.strip(): value.strip() for name, value in fields.items()}
    can_do = sorted(flag for flag in by_name.get("flags", "").split() if flag.startswith(("avx", "amx", "fma")))
    return " ".join([by_name.get("model name", platform.machine()), *can_do])
