"""Compiles the kernels into one library in this folder: `python sgl_prefill/cpu/native/build.py [--if-needed]`.

The package's installation runs this file by its path, so it imports nothing of the package. Any recent g++ (or clang++ with
GNU OpenMP) works. The library holds one build per kind of processor and can be loaded on every processor of its architecture.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernels.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"),
    *("-Wall", "-Wextra"),
)
TIMEOUT_S = 300


class Build(NamedTuple):
    """One kind of processor."""

    name: str
    flags: tuple[str, ...] = ()


AVX512 = ("-march=x86-64-v4",)
# The best first: a processor gets the first build that it runs.
X86_BUILDS = (
    Build("amx", (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    Build("avx512_bf16", (*AVX512, "-mavx512bf16")),
    Build("avx512", AVX512),
    Build("avx2", ("-march=x86-64-v3",)),
)
PLAIN = Build("plain")


class BuildError(Exception):
    """The library cannot be built; says why."""


def digest() -> str:
    """Hashes flags, builds and sources."""
    made_from = hashlib.sha256(repr((FLAGS, X86_BUILDS)).encode())
    for source in sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]):
        made_from.update(source.read_bytes())
    return made_from.hexdigest()[:16]


def compile_library(target: Path = LIBRARY) -> tuple[str, ...]:
    """Writes `target` and returns the names of its builds. Builds that the compiler does not support are left out.

    Raises BuildError if there is no compiler, or the plain build fails.
    """
    named = shlex.split(os.environ.get("CXX", ""))  # may hold arguments or a wrapper ("ccache g++")
    compiler = named or [name for name in COMPILERS if shutil.which(name)][:1]
    if not compiler:
        raise BuildError(
            f"there is no C++ compiler: install {' or '.join(COMPILERS[1:])}, or name one in the variable CXX"
        )
    shown = shlex.join(compiler) + (" (of the variable CXX)" if named else "")
    builds = (*(X86_BUILDS if platform.machine() in ("x86_64", "AMD64") else ()), PLAIN)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(builds)) as pool:

        def compile_build(build: Build) -> str | None:
            options = *build.flags, f"-DSGL_PREFILL_BUILD={build.name}", "-c", str(FOLDER / "build.cpp")
            return _error_of([*compiler, *FLAGS, *options, "-o", f"{folder}/{build.name}.o"])

        errors = dict(zip(builds, pool.map(compile_build, builds), strict=True))
        if (error := errors[PLAIN]) is not None:
            raise BuildError(f"{shown} cannot compile the kernels: {error}")
        names = tuple(build.name for build in builds if errors[build] is None)
        objects = [f"{folder}/{name}.o" for name in names]
        listed = " ".join(f"do({name})" for name in names)
        defines = f'-DSGL_PREFILL_DIGEST="{digest()}"', f"-DSGL_PREFILL_BUILDS(do)={listed}"
        sources = str(FOLDER / "dispatch.cpp"), *objects
        linked = f"{folder}/kernels.so"
        if (error := _error_of([*compiler, *FLAGS, *defines, "-shared", *sources, "-o", linked])) is not None:
            raise BuildError(f"{shown} cannot link the kernels: {error}")
        # Replaces the file in one step: a process that has mapped the old library keeps it.
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(f".{os.getpid()}")
        shutil.copy(linked, beside)
        os.replace(beside, target)
    return names


def _error_of(command: Sequence[str]) -> str | None:
    """Runs a compiler. Returns the first line of its errors, or None. Raises BuildError if it cannot be started."""
    try:
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    except OSError as error:
        origin = "what the variable CXX names" if os.environ.get("CXX") else command[0]
        raise BuildError(f"{origin} cannot be run: {error}") from error
    if ended.returncode == 0:
        return None
    lines = ended.stderr.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message").strip()


def is_current() -> bool:
    """Whether the library exists and was built from these sources."""
    return LIBRARY.exists() and digest().encode() in LIBRARY.read_bytes()


def main(arguments: list[str]) -> int:
    if "--if-needed" in arguments and is_current():
        return 0
    try:
        names = compile_library()
    except BuildError as error:
        print(f"the native kernels are not built, PyTorch's serve: {error}", file=sys.stderr)
        return 1
    print(f"native kernels built: {', '.join(names)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
