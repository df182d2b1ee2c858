"""Compiles the kernels into one library beside this file: `python sgl_prefill/cpu/native/build.py [--if-needed]`.

Run by the package's installation, by path: nothing of the package is imported. Any g++ (or clang++ with GNU OpenMP) of the
last years will do. The library holds a build for each kind of processor and is loadable on all of its architecture.
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
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernels.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra")
TIMEOUT_S = 300


class Build(NamedTuple):
    """One kind of processor."""

    name: str
    flags: tuple[str, ...] = ()


AVX512 = ("-march=x86-64-v4",)
# The best first: a processor gets the first one that it runs.
X86_BUILDS = (
    Build("amx", (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    Build("avx512_bf16", (*AVX512, "-mavx512bf16")),
    Build("avx512", AVX512),
    Build("avx2", ("-march=x86-64-v3",)),
)
PLAIN = Build("plain")


class BuildError(Exception):
    """There is no library, and why."""


def digest() -> str:
    """Hashes all that the library is made from."""
    made_from = hashlib.sha256(repr((FLAGS, X86_BUILDS)).encode())
    for source in sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]):
        made_from.update(source.read_bytes())
    return made_from.hexdigest()[:16]


def compile_library(target: Path = LIBRARY) -> tuple[str, ...]:
    """Make `target`; the names of the builds in it. A build that this compiler does not know is left out.

    Raises BuildError where there is no compiler, or not even plain C++ compiles.
    """
    compiler = _compiler()
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    with tempfile.TemporaryDirectory() as folder:
        running = {build: _start(compiler, build, Path(folder)) for build in (*(X86_BUILDS if is_x86 else ()), PLAIN)}
        errors = {build: _errors(process) for build, process in running.items()}
        built = [build for build, process in running.items() if process.returncode == 0]
        if PLAIN not in built:
            raise BuildError(f"{_shown(compiler)} cannot compile the kernels: {_first_error(errors[PLAIN])}")
        listed = " ".join(f"do({build.name})" for build in built)
        library = Path(folder) / "kernels.so"
        objects = [str(_object(build, Path(folder))) for build in built]
        defines = [f'-DSGL_PREFILL_DIGEST="{digest()}"', f"-DSGL_PREFILL_BUILDS(do)={listed}"]
        linked = _run(
            [*compiler, *FLAGS, *defines, "-shared", str(FOLDER / "dispatch.cpp"), *objects, "-o", str(library)]
        )
        linking_errors = _errors(linked)
        if linked.returncode != 0:
            raise BuildError(f"{_shown(compiler)} cannot link the kernels: {_first_error(linking_errors)}")
        # A process may have the old library mapped: it keeps its file.
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(f".{os.getpid()}")
        shutil.copy(library, beside)
        os.replace(beside, target)
    return tuple(build.name for build in built)


def _compiler() -> list[str]:
    """Returns the command: CXX may bring arguments or a wrapper ("ccache g++")."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found:
        raise BuildError(
            f"there is no C++ compiler: install {' or '.join(COMPILERS[1:])}, or name one in the variable CXX"
        )
    return found


def _shown(compiler: list[str]) -> str:
    origin = " (of the variable CXX)" if os.environ.get("CXX") else ""
    return f"{shlex.join(compiler)}{origin}"


def _start(compiler: list[str], build: Build, folder: Path) -> subprocess.Popen[str]:
    name = f"-DSGL_PREFILL_BUILD={build.name}"
    return _run(
        [*compiler, *FLAGS, *build.flags, name, "-c", str(FOLDER / "build.cpp"), "-o", str(_object(build, folder))]
    )


def _run(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        origin = "what the variable CXX names" if os.environ.get("CXX") else command[0]
        raise BuildError(f"{origin} cannot be run: {error}") from error


def _errors(process: subprocess.Popen[str]) -> str:
    """Returns what the compiler had to say, once it has ended."""
    try:
        return process.communicate(timeout=TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no end after {TIMEOUT_S} s"


def _object(build: Build, folder: Path) -> Path:
    return folder / f"{build.name}.o"


def _first_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return errors[0].strip()


def is_current() -> bool:
    """Tells whether the library is there and made from these sources."""
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
