"""Examines the machine before and during a start: CUDA driver and toolkit, FlashInfer, memory, ports, packages.

    eval "$(python -m sgl_prefill.startup.examine)"

sets for a shell the environment that the launcher sets for itself: a CUDA toolkit and ninja, for kernels that SGLang, FlashInfer
and DeepGEMM compile at their first call. NVIDIA's pip packages contain a toolkit in a folder where none of them looks, with other
names: `lib` instead of `lib64`, `libcudart.so.13` instead of `libcudart.so`.

Imports neither torch nor SGLang; `arguments` checks SGLang's arguments.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import shutil
import socket
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from sgl_prefill.core import gpu_memory
from sgl_prefill.core.gpu_memory import GIB
from sgl_prefill.errors import MemoryPlanError
from sgl_prefill.startup.disk_cache import cache_root

if TYPE_CHECKING:
    from sgl_prefill.startup.device import Device

logger = logging.getLogger(__name__)

# CUDA toolkit.
USUAL_HOME = Path("/usr/local/cuda")
RUNTIME = Path("lib64", "libcudart.so")  # in a toolkit; kernels are linked with it
REMEDY = (
    "SGLang compiles kernels at their first call, with nvcc and ninja: install a CUDA 13 toolkit and name its folder in"
    " CUDA_HOME, or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl ninja`, which are found without it"
)
# SGLang's dependencies pin the headers of CUDA 13.0 but not nvcc, and headers refuse a compiler of another minor version.
COMPILER, HEADERS = "nvidia-cuda-nvcc", "nvidia-cuda-runtime"
MIXED_VERSIONS = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
VARIABLES = ("CUDA_HOME", "NVCC_PREPEND_FLAGS", "PATH")  # that `prepare_cuda` may set
# DeepGEMM (FP8 matrix products on Hopper and Blackwell) compiles a kernel for each number of rows before the first step: 65,536
# for unchunked requests; with this variable 3,072 of up to 16,384 rows.
FAST_WARM_UP = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"

# CUDA driver.
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
DRIVER_OF_CUDA = {12: "525.60", 13: "580.65"}  # first driver of each CUDA version that PyTorch is built for

FLASHINFER = "flashinfer-python"
UNCHECKED = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"  # SGLang's variable for users who build packages themselves

TRACE_MODULES = (
    "opentelemetry.sdk.trace.export",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",  # SGLang always imports both
)

# Card memory. Floating-point weights become the model's dtype, of at least two bytes; other weights are loaded as they are.
FLOATS, FLOAT_BYTES = ("F64", "F32", "F16", "BF16"), 2
NAMED_SHARE = 0.05  # messages mention other processes from this share of the card on: less is a desktop, or CUDA itself


def prepare_cuda(environment: MutableMapping[str, str] = os.environ, usual: Path = USUAL_HOME) -> None:
    """Sets CUDA_HOME to the pip packages' toolkit where SGLang would find none, adds their ninja to PATH, and shortens
    DeepGEMM's warm-up unless the user has set its variable. Missing tools are only logged: an earlier start may have compiled
    all kernels.
    """
    environment.setdefault(FAST_WARM_UP, "1")
    _prepare_toolkit(environment, usual)
    path = environment.get("PATH", "")
    if shutil.which("ninja", path=path) is None:
        beside = Path(sys.executable).parent  # of a virtual environment that is not activated
        if (beside / "ninja").exists():
            environment["PATH"] = os.pathsep.join(filter(None, (str(beside), path)))
        else:
            logger.warning("there is no ninja on PATH or in %s: %s", beside, REMEDY)


def _prepare_toolkit(environment: MutableMapping[str, str], usual: Path) -> None:
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    if (found := found_toolkit(environment, usual)) is not None:
        named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
        if nvcc is not None and not named and found != Path(nvcc).parent.parent:
            environment["CUDA_HOME"] = str(found)  # SGLang would take the folder of the wrapper, which has no libraries
        return
    if (packaged := packaged_toolkit()) is None:
        if nvcc is None:
            logger.warning("no CUDA toolkit is in CUDA_HOME, on PATH or in %s: %s", usual, REMEDY)
        return
    environment["CUDA_HOME"] = str(link_toolkit(packaged, cache_root() / "cuda-home"))
    flags = environment.get("NVCC_PREPEND_FLAGS", "")
    minor_versions = {".".join((_installed(one) or "").split(".")[:2]) for one in (COMPILER, HEADERS)}
    if len(minor_versions) > 1 and MIXED_VERSIONS not in flags:
        environment["NVCC_PREPEND_FLAGS"] = f"{flags} {MIXED_VERSIONS}".strip()


def found_toolkit(environment: Mapping[str, str], usual: Path = USUAL_HOME) -> Path | None:
    """Returns the toolkit of the user's variables, or the one beside nvcc or in the usual place that has libraries to link."""
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(home)
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    homes = [usual] if nvcc is None else [Path(nvcc).parent.parent, usual]
    return next((home for home in homes if (home / RUNTIME).exists()), None)


def packaged_toolkit() -> Path | None:
    """Returns the folder of NVIDIA's newest pip packages that contains nvcc."""
    site_packages = Path(sysconfig.get_path("purelib"))
    return max((path.parents[1] for path in site_packages.glob("nvidia/cu*/bin/nvcc")), default=None)


def link_toolkit(toolkit: Path, home: Path, driver: Path | None = None) -> Path:
    """Fills `home` with links in the layout of an installed toolkit, and returns it.

    driver: libcuda's file, with which FlashInfer links; None: the one that this machine loads.
    """
    libraries = home / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(home / name, toolkit / name)
    for file in (toolkit / "lib").iterdir():
        _link(libraries / file.name, file)
        if ".so." in file.name:
            _link(libraries / f"{file.name.partition('.so.')[0]}.so", file)
    if driver is None and _driver() is not None:
        driver = _mapped_file(Path("/proc/self/maps").read_text().splitlines())
    if driver is not None:
        _link(libraries / "libcuda.so", driver)
    return home


def _link(name: Path, target: Path) -> None:
    """Replaces a link atomically: two engines may start together."""
    if name.is_symlink() and name.readlink() == target:
        return
    with tempfile.TemporaryDirectory(dir=name.parent) as scratch:
        new = Path(scratch) / name.name
        new.symlink_to(target)
        os.replace(new, name)


def _mapped_file(maps: Iterable[str]) -> Path | None:
    return next((Path(line.split()[-1]) for line in maps if "/libcuda.so" in line), None)


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_version() -> int | None:
    """Newest CUDA version that the driver supports, 1000 x major + 10 x minor. Creates no CUDA context: launchers must not."""
    found = ctypes.c_int(0)
    library = _driver()
    return None if library is None or library.cuDriverGetVersion(ctypes.byref(found)) != 0 else found.value


def has_card() -> bool:
    """Whether this process may use an NVIDIA GPU. Does not check the driver."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    wants_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    return not is_hidden and not wants_cpu and bool(glob.glob(NVIDIA_DEVICES))


def driver_problems(torch_cuda: str | None) -> list[str]:
    """Finds a driver that is too old for PyTorch: PyTorch would see no GPU, and the engine would serve on the CPU.

    torch_cuda: the CUDA version that PyTorch was built for; None: without CUDA.
    """
    if torch_cuda is None or not has_card():
        return []
    needed, driver = int(torch_cuda.split(".")[0]), driver_version()
    first = DRIVER_OF_CUDA.get(needed)
    update = f"update NVIDIA's driver{f' to {first} or newer' if first else ''}"
    otherwise = "or hide the GPU with CUDA_VISIBLE_DEVICES= to serve on the CPU"
    if driver is None:
        return [
            "there is an NVIDIA GPU, but its driver library (libcuda.so.1) is missing or does not answer: start a container with"
            f" the GPU's driver (--gpus all); else {update}; {otherwise}"
        ]
    if driver // 1000 >= needed:
        return []
    return [
        f"the driver of this GPU supports CUDA {driver // 1000}.{driver % 1000 // 10}, and the installed PyTorch is for CUDA"
        f" {torch_cuda}: {update} (`nvidia-smi` shows its version); on a data centre card the package cuda-compat-{needed}-0"
        f" does too; {otherwise}"
    ]


def flashinfer_problems(backends: Iterable[str | None]) -> list[str]:
    """Finds FlashInfer missing or older than SGLang needs. SGLang checks only --attention-backend, with a traceback.

    backends: attention backends as SGLang has resolved them.
    """
    if "flashinfer" not in backends or os.environ.get(UNCHECKED, "").lower() in ("1", "true"):
        return []
    from packaging.version import Version

    needed, found = _needed_flashinfer(), _installed(FLASHINFER)
    package = f"'{FLASHINFER}[cu13]{'' if needed is None else '==' + needed}'"
    remedy = f"run `pip install {package}`, or start with --attention-backend triton"
    if found is None:
        return [f"--attention-backend is flashinfer, and {FLASHINFER} is not installed: {remedy}"]
    if needed is not None and Version(found) < Version(needed):
        return [f"{FLASHINFER} {found} is installed, and SGLang needs {needed}: {remedy}"]
    return []


def _needed_flashinfer() -> str | None:
    """Returns the version in SGLang's metadata."""
    for line in importlib.metadata.requires("sglang") or ():
        if found := re.match(r"flashinfer[-_]python\b[^;]*==\s*([\w.]+)", line):
            return found[1]
    return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def trace_problems() -> list[str]:
    """Finds a missing package of --enable-trace: SGLang's scheduler would end with a RuntimeError."""
    for name in TRACE_MODULES:
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a parent package is missing
            is_there = False
        if not is_there:
            return [
                f"--enable-trace needs OpenTelemetry's SDK and its OTLP exporters, and there is no module {name}:"
                " run `pip install '.[trace]'`, or leave --enable-trace out"
            ]
    return []


def free_memory_gb() -> tuple[float, float]:
    """Returns GiB of free memory (for this process, of the machine)."""
    free_gb: float = psutil.virtual_memory().available / GIB  # as SGLang counts it
    return min(free_gb, container_free_bytes() / GIB), free_gb


def container_free_bytes(system: Path = Path("/")) -> float:
    """Memory left in this process's control group (cgroup v1 or v2) and its parents; infinity without a limit.

    system: the folder of `proc` and `sys`.
    """
    left = [math.inf]
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = system / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        group = root / path.lstrip("/")  # may not exist in a container, where the root is the group
        left.append(_group_free_bytes(group, is_v1=bool(controllers)))
        while group != root:
            group = group.parent
            left.append(_group_free_bytes(group, is_v1=bool(controllers)))
    return min(left)


def _group_free_bytes(folder: Path, *, is_v1: bool) -> float:
    limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    prefix = "total_" if is_v1 else ""
    try:
        limit_bytes = int((folder / limit).read_text())  # a ValueError for "max": no limit
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The kernel can drop cached pages of files.
        file_bytes = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return max(limit_bytes - max(int((folder / usage).read_text()) - file_bytes, 0), 0)
    except (OSError, ValueError):
        return math.inf


def port_problems(listening: Sequence[tuple[str, str, int]]) -> list[str]:
    """Finds ports that a server cannot listen on. listening: flag, host and port of each."""
    ports = [port for _, _, port in listening]
    problems = [f"{flag} {port} is asked for twice" for flag, _, port in listening if ports.count(port) > 1]
    return problems or [problem for one in listening for problem in _port_problems(*one)]


def _port_problems(flag: str, host: str, port: int) -> list[str]:
    if not 0 < port < 65536:
        return [f"{flag} is {port}: it must be from 1 to 65535"]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return [f"{flag} {port} on {host} cannot be used ({error.strerror or error}): choose another"]
    return []


def check_card(device: Device, model_path: str, n_ranks: int, *, loads_all_as_it_is: bool = True) -> None:
    """Before the weights are loaded: raises MemoryPlanError where they and a margin exceed the free memory of the card, and logs
    memory of other processes.

    loads_all_as_it_is: weights are neither quantized at load nor kept on the host; else their size is not checked.
    """
    free_bytes, total_bytes = device.free_bytes(), device.total_bytes()
    if total_bytes - free_bytes > NAMED_SHARE * total_bytes:
        logger.warning("%s", _held_by_others(device, free_bytes))
    weights_bytes = least_weights_bytes(Path(model_path)) if loads_all_as_it_is else None
    if weights_bytes is None:
        return
    needed_bytes = weights_bytes // n_ranks + gpu_memory.margin_bytes(total_bytes)
    if needed_bytes > free_bytes:
        name = gpu_memory.model_name(model_path)
        raise MemoryPlanError(_too_large(device, name, weights_bytes // n_ranks, needed_bytes - free_bytes, free_bytes))


def out_of_memory(device: Device, model_path: str, free_at_start_bytes: int, error: BaseException) -> str:
    """Returns the message of a start that ran out of memory. free_at_start_bytes: before loading the weights."""
    name, total_bytes = gpu_memory.model_name(model_path), device.total_bytes()
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    weights_bytes = least_weights_bytes(Path(model_path))
    weights = "" if weights_bytes is None else f" Its weights take {weights_bytes / GIB:.1f} GiB."
    is_shared = total_bytes - free_at_start_bytes > NAMED_SHARE * total_bytes
    held = f" {_held_by_others(device, free_at_start_bytes)}" if is_shared else ""
    return (
        f"{name} ran out of memory on {device.model()} while it started ({reason}): {free_at_start_bytes / GIB:.1f} of"
        f" {total_bytes / GIB:.1f} GiB were free at the start.{weights}{held} Take a card with more memory, more cards with"
        " --tp-size, or a smaller or quantized model"
    )


def no_room_for_kv(device: Device, model: str, weights_bytes: int, free_bytes: int, fraction: float) -> str:
    """Returns the message where SGLang finds no memory for KV beside the weights. free_bytes: after loading the weights."""
    spare_bytes = free_bytes - gpu_memory.margin_bytes(device.total_bytes())
    if spare_bytes > 0:
        return (
            f"--mem-fraction-static {fraction:g} leaves no memory for KV beside the weights of {model}"
            f" ({weights_bytes / GIB:.1f} GiB) on {device.model()}, of which {free_bytes / GIB:.1f} GiB are free: raise it"
        )
    return _too_large(device, model, weights_bytes, GIB // 10 - spare_bytes, free_bytes + weights_bytes)


def _too_large(device: Device, model: str, weights_bytes: int, missing_bytes: int, free_bytes: int) -> str:
    total_bytes = device.total_bytes()
    message = gpu_memory.too_small(model, device.model(), total_bytes, weights_bytes, missing_bytes)
    if total_bytes - free_bytes <= NAMED_SHARE * total_bytes:
        return message
    if missing_bytes > total_bytes - free_bytes:
        return f"{message}. {_held_by_others(device, free_bytes)}"
    return (
        f"{model} does not fit what is free of this {device.model()}: {missing_bytes / GIB:.1f} GiB are missing for"
        f" {weights_bytes / GIB:.1f} GiB of weights and a margin. {_held_by_others(device, free_bytes)}"
    )


def _held_by_others(device: Device, free_bytes: int) -> str:
    total_bytes = device.total_bytes()
    return (
        f"{free_bytes / GIB:.1f} of the {total_bytes / GIB:.1f} GiB of {device.model()} are free, and"
        f" {(total_bytes - free_bytes) / GIB:.1f} GiB are held by other processes (nvidia-smi lists them): start those with a"
        " smaller --mem-fraction-static, which is a share of what is free when an engine starts, or take another card with"
        " CUDA_VISIBLE_DEVICES"
    )


def least_weights_bytes(folder: Path) -> int | None:
    """Lower bound of the weights' bytes: from headers of safetensors files, or from config.json for `--load-format dummy`; None
    for a model on the hub or in another format.
    """
    try:
        if files := _safetensors_files(folder):
            return sum(_least_bytes(tensor) for file in files for tensor in _tensors(file))
        config = json.loads((folder / "config.json").read_text())
        return gpu_memory.shape_of(folder.name, config).weights_bytes if not any(folder.glob("*.bin")) else None
    except (OSError, ValueError, KeyError, struct.error):
        return None


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.exists() else []


def _tensors(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        (n_bytes,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(n_bytes))
    yield from (tensor for name, tensor in header.items() if name != "__metadata__")


def _least_bytes(tensor: dict[str, Any]) -> int:
    if tensor["dtype"] in FLOATS:
        shape: list[int] = tensor["shape"]
        return math.prod(shape) * FLOAT_BYTES
    start, end = tensor["data_offsets"]
    return int(end - start)


def main() -> int:
    """Prints the `export` lines for a shell, and returns the exit status."""
    environment = dict(os.environ)
    prepare_cuda(environment)
    for name in VARIABLES:
        if environment.get(name) != os.environ.get(name):
            print(f"export {name}={shlex.quote(environment[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
