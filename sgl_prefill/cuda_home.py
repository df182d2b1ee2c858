"""A CUDA toolkit made of what pip has installed, for the kernels that SGLang compiles when they are first called.

    eval "$(python -m sgl_prefill.cuda_home)"

SGLang's norms, activations and rotary embeddings, flashinfer and DeepGEMM are compiled by nvcc, and linked by ninja, on the
machine that runs them. They look for a toolkit in CUDA_HOME, beside the nvcc of PATH and in /usr/local/cuda. NVIDIA's packages
bring all of one, but in a folder that none of them looks into, and with other names: `lib` for `lib64`, `libcudart.so.13`
for `libcudart.so`. Our launcher does by itself what the command above does for a shell.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from sgl_prefill.disk_cache import cache_root

USUAL_HOME = Path("/usr/local/cuda")
REMEDY = (
    "SGLang compiles kernels at their first call, with nvcc and ninja: install a CUDA 13 toolkit and name its folder in"
    " CUDA_HOME, or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl ninja`, which are found without it"
)
# SGLang's dependencies pin the headers of CUDA 13.0 and leave nvcc open: headers refuse a compiler of another minor version.
COMPILER, HEADERS = "nvidia-cuda-nvcc", "nvidia-cuda-runtime"
MIXED_VERSIONS = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
VARIABLES = ("CUDA_HOME", "NVCC_PREPEND_FLAGS", "PATH")  # that `prepare` may set

logger = logging.getLogger(__name__)

# DeepGEMM compiles for each number of rows that a step may have, before the first step. Where requests run in one piece SGLang
# knows no limit, and takes 65,536 of them; with this 3,072 of those up to 16,384. Another one is compiled when it comes.
FAST_WARM_UP = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"


def shorten_warm_up(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets DeepGEMM, which multiplies FP8 matrices on Hopper and Blackwell cards, compile typical sizes alone; what the user says
    counts."""
    environment.setdefault(FAST_WARM_UP, "1")


def prepare(environment: MutableMapping[str, str] = os.environ, usual: Path = USUAL_HOME) -> None:
    """Names the packages' toolkit in CUDA_HOME where SGLang would find none, and adds their ninja to PATH.

    What is missing is a line in the log: kernels that were compiled before may be all that a server needs.
    """
    if found(environment, usual) is None:
        if (packaged := packaged_toolkit()) is None:
            logger.warning("no CUDA toolkit is in CUDA_HOME, on PATH or in %s: %s", usual, REMEDY)
        else:
            environment["CUDA_HOME"] = str(made_of(packaged, cache_root() / "cuda-home"))
            flags = environment.get("NVCC_PREPEND_FLAGS", "")
            if _minor_version(COMPILER) != _minor_version(HEADERS) and MIXED_VERSIONS not in flags:
                environment["NVCC_PREPEND_FLAGS"] = f"{flags} {MIXED_VERSIONS}".strip()
    path = environment.get("PATH", "")
    if shutil.which("ninja", path=path) is None:
        beside = Path(sys.executable).parent  # of an environment that nobody has activated
        if (beside / "ninja").exists():
            environment["PATH"] = os.pathsep.join(filter(None, (str(beside), path)))
        else:
            logger.warning("there is no ninja on PATH or in %s: %s", beside, REMEDY)


def found(environment: Mapping[str, str], usual: Path = USUAL_HOME) -> Path | None:
    """Returns the toolkit that SGLang, flashinfer and DeepGEMM find by themselves."""
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(home)
    if nvcc := shutil.which("nvcc", path=environment.get("PATH", "")):
        return Path(nvcc).parent.parent
    return usual if usual.exists() else None


def packaged_toolkit(site_packages: Path | None = None) -> Path | None:
    """Returns the folder of NVIDIA's packages that holds nvcc, the newest, or None."""
    site_packages = site_packages or Path(sysconfig.get_path("purelib"))
    return max((path.parents[1] for path in site_packages.glob("nvidia/cu*/bin/nvcc")), default=None)


def made_of(toolkit: Path, home: Path, driver: Path | None = None) -> Path:
    """Makes a folder of links that is laid out as an installed toolkit, and returns it.

    Args:
        driver: the file of libcuda, which a program is linked with; None: the one that this machine loads.
    """
    libraries = home / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(home / name, toolkit / name)
    for file in (toolkit / "lib").iterdir():
        _link(libraries / file.name, file)
        if ".so." in file.name:
            _link(libraries / f"{file.name.partition('.so.')[0]}.so", file)
    if (driver := driver or _driver()) is not None:
        _link(libraries / "libcuda.so", driver)
    return home


def _driver() -> Path | None:
    """Returns the file that the driver's library is loaded from."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return _mapped_file(Path("/proc/self/maps").read_text().splitlines())


def _mapped_file(maps: Iterable[str]) -> Path | None:
    return next((Path(line.split()[-1]) for line in maps if "/libcuda.so" in line), None)


def _link(name: Path, target: Path) -> None:
    """Two engines may start together: a link is there whole, or not at all."""
    if name.is_symlink() and name.readlink() == target:
        return
    with tempfile.TemporaryDirectory(dir=name.parent) as scratch:
        new = Path(scratch) / name.name
        new.symlink_to(target)
        os.replace(new, name)


def _minor_version(distribution: str) -> list[str] | None:
    """Returns the first two numbers of an installed version."""
    try:
        return importlib.metadata.version(distribution).split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Prints what a shell has to run, and returns the exit status."""
    environment = dict(os.environ)
    prepare(environment)
    for name in VARIABLES:
        if environment.get(name) != os.environ.get(name):
            print(f"export {name}={shlex.quote(environment[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
