"""The device of the model, host or accelerator: its memory, aliased buffers, timing, and how a start measures on it."""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import psutil
import torch

from sgl_prefill.cpu.detect import has_accelerator
from sgl_prefill.errors import NoMemoryLeftError

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLE_INTERVAL_S = 0.0005
# In a RuntimeError of PyTorch's CPU allocator, of loading or running a kernel (PyTorch, Triton), or of cuBLAS.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class AliasedMemory(Protocol):
    """Buffers whose tails are the same physical memory (see `kv`)."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The buffers, uint8."""

    @property
    def backed_bytes(self) -> int:
        """Committed device memory; 0 on a host."""

    @property
    def rounding_bytes(self) -> int:
        """Upper limit of the memory that `commit_own` and `commit_shared` take beyond their `n_bytes`, together."""

    def commit_own(self, n_bytes: int) -> None:
        """Backs the first `n_bytes` of each buffer with zeros. Raises AliasedMemoryError."""

    def commit_shared(self, n_bytes: int) -> None:
        """Backs the first `n_bytes` of the tail with zeros. Raises AliasedMemoryError."""

    def release_shared(self) -> None:
        """Frees the tail's memory."""

    def close(self) -> None: ...


class Device(abc.ABC):
    """Made by `device_of` from a name of torch's, and by `this_device`."""

    is_host: ClassVar[bool]
    chunk_candidates: ClassVar[
        tuple[int, ...]
    ]  # chunk sizes of hybrid prefilling in tokens, among which a start chooses
    plain_tokens: ClassVar[int]  # extends of at most so many run in SGLang's layers, which copy nothing
    budget_flag: ClassVar[str]  # the option that gives the engine more memory
    budget_holds_activations: ClassVar[bool]  # besides the KV pool; else SGLang has reserved memory for them
    backs_on_use: ClassVar[bool]  # aliased memory is backed when it is written, else when it is committed
    extrapolates_memory: ClassVar[bool]  # a start extrapolates from shorter inputs, else it runs the longest input
    has_native_kernels: ClassVar[bool]
    warm_up_rounds: ClassVar[int]  # of a timing, not counted
    fewest_rounds: ClassVar[int]  # of a timing, however long they take

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def model(self) -> str:
        """Name of the processor or the card, on which measurements depend."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Free device memory in bytes: not allocated by any process, including this one."""

    @abc.abstractmethod
    def total_bytes(self) -> int: ...

    @abc.abstractmethod
    def granularity_bytes(self) -> int:
        """Sizes of aliased memory must be multiples of this."""

    @abc.abstractmethod
    def aliased_memory(self, n_buffers: int, own_bytes: int, shared_bytes: int) -> AliasedMemory:
        """Makes `n_buffers` buffers of `own_bytes` each, with a common tail. Raises AliasedMemoryError."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until all launched work is done."""

    @abc.abstractmethod
    def release_unused(self) -> None:
        """Returns the allocator's unused memory to the system or driver."""

    @abc.abstractmethod
    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Peak memory of `run` above the memory in use before it. May call `run` more than once."""

    def time_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds of `run` and of all work that it launches."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return 1000 * (time.perf_counter() - started)


class Host(Device):
    is_host = True
    chunk_candidates = (256, 512, 1024, 2048)
    plain_tokens = 0
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
        pass

    def release_unused(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()  # allocates what stays: KV slots, threads, kernels, caches
        self.release_unused()
        # Anonymous memory only: the kernel would count each mapping of suffix scratch.
        with PeakWatch(anonymous_bytes, anonymous_bytes(), SAMPLE_INTERVAL_S) as watch:
            run()
        return watch.peak_bytes


class Accelerator(Device):
    is_host = False
    chunk_candidates = (1024, 2048, 4096, 8192)
    plain_tokens = 8192  # SGLang's own limit of a step; the memory plan holds them
    budget_flag = "--mem-fraction-static"
    budget_holds_activations = False
    backs_on_use = False
    extrapolates_memory = False
    has_native_kernels = False
    warm_up_rounds, fewest_rounds = 3, 5  # kernels compile at first use, and clocks are low at first

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
        """Measures by the device's clock, since this thread may be late by a millisecond."""
        self.synchronize()
        started = self.mark()
        run()
        ended = self.mark()
        self.synchronize()
        return self.ms_between(started, ended)

    def mark(self) -> Any:
        """Marks the end of what this thread's stream has been given so far."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def ms_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    @contextmanager
    def reading_after(self, mark: Any) -> Iterator[None]:
        """Within the block, reads wait for the mark, and not for what the stream was given later."""
        with self._module.stream(self._reader):
            self._reader.wait_event(mark)
            yield
            self._reader.synchronize()

    @functools.cached_property
    def _reader(self) -> Any:
        return self._module.Stream()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that this machine or its device has no memory left."""
    if isinstance(error, (MemoryError, NoMemoryLeftError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def device_of(name: str) -> Device:
    """name: as in torch, e.g. "cpu" or "cuda:0"."""
    return Host(name) if torch.device(name).type == "cpu" else Accelerator(name)


def this_device() -> Device:
    """The device of this machine, detected without SGLang."""
    return Accelerator("cuda") if has_accelerator() else Host("cpu")


def _processor() -> str:
    """Returns the processor's name and its vector instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    by_name = {name.strip(): value.strip() for name, value in fields.items()}
    instructions = sorted(flag for flag in by_name.get("flags", "").split() if flag.startswith(("avx", "amx", "fma")))
    return " ".join([by_name.get("model name", platform.machine()), *instructions])


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process that is neither backed by a file nor shared."""
    _, resident, shared, *_ = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class PeakWatch:
    """Highest value of `read()` above `baseline_bytes` while the block runs, polled every `interval_s` by a thread, which ends
    early if the process that is read ends.
    """

    def __init__(self, read: Callable[[], int], baseline_bytes: int, interval_s: float) -> None:
        self.peak_bytes = 0
        self._read, self._baseline_bytes, self._interval_s = read, baseline_bytes, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                grown = self._read() - self._baseline_bytes
            except (FileNotFoundError, ProcessLookupError):
                return
            self.peak_bytes = max(self.peak_bytes, grown)
