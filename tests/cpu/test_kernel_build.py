"""The native kernels are compiled at installation where there is a compiler, and nothing fails where there is none."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from sgl_prefill.cpu.native import build
from sgl_prefill.cpu.native.build import BuildError, compile_library

ROOT = Path(__file__).parents[2]
NATIVE = "sgl_prefill/cpu/native/"

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="there is no C++ compiler"
)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def quick_compiler(folder: Path, before: str = "") -> str:
    """The machine's own, without optimisation: all builds in seconds. A warning is an error."""
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    return script(folder / "quick-c++", f'{before}\nexec {compiler} "$@" -O0 -Werror')


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: install g\+\+ or clang\+\+, or .* the variable CXX"):
        compile_library(tmp_path / "kernels.so")
    assert not (tmp_path / "kernels.so").exists()


def test_a_compiler_that_is_not_there_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(BuildError, match=r"what the variable CXX names cannot be run: .*/nonexistent"):
        compile_library(tmp_path / "kernels.so")


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first error; it is named with the variable that chose it."""
    monkeypatch.setenv("CXX", script(tmp_path / "failing", "echo 'note'; echo 'x.h:1: error: no OpenMP' >&2; exit 1"))
    with pytest.raises(BuildError, match=r"failing \(of the variable CXX\) cannot compile .*: x.h:1: error: no OpenMP"):
        compile_library(tmp_path / "kernels.so")


def test_a_compiler_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "endless", "exec tail -f /dev/null"))
    monkeypatch.setattr(build, "TIMEOUT_S", 0.01)
    with pytest.raises(BuildError, match="cannot compile the kernels: no end after"):
        compile_library(tmp_path / "kernels.so")


def test_a_failed_build_keeps_the_library_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m sgl_prefill.cpu.native.build` ends with 1; with --if-needed and a current library it does not compile."""
    library = tmp_path / "kernels.so"
    library.write_text(f"earlier, from {build.digest()}")
    monkeypatch.setattr(build, "LIBRARY", library)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.main([]) == 1
    assert "the native kernels are not built, PyTorch's serve: what the variable CXX" in capsys.readouterr().err
    assert library.read_text().startswith("earlier")
    assert build.main(["--if-needed"]) == 0
    library.write_text("earlier, from other sources")
    assert not build.is_current()
    assert build.main(["--if-needed"]) == 1


@needs_compiler
def test_a_build_that_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An older compiler, without AMX; the variable CXX may hold a wrapper and arguments."""
    refusal = 'case "$*" in *-mamx-bf16*) echo "error: -mamx-bf16" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", f"env {quick_compiler(tmp_path, refusal)} -DUNUSED")
    library = tmp_path / "made" / "kernels.so"
    known = [one.name for one in (*build.X86_BUILDS, build.PLAIN)]
    assert compile_library(library) in (tuple(known[1:]), ("plain",))  # plain alone: not an x86 processor
    assert build.digest().encode() in library.read_bytes()
    assert [path.name for path in library.parent.iterdir()] == ["kernels.so"], "nothing is left beside it"


class Wheel(NamedTuple):
    names: set[str]
    path: Path


def make_wheel(folder: Path, compiler: str) -> Wheel:
    """Of a copy of what is committed or about to be, without what a build has left in the working tree."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "sgl_prefill", source / "sgl_prefill", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
    ended = subprocess.run(command, env={**os.environ, "CXX": compiler}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = folder.glob("*.whl")
    return Wheel(set(zipfile.ZipFile(path).namelist()), path)


def sources() -> set[str]:
    return {NATIVE + path.name for path in build.FOLDER.iterdir() if path.suffix in (".h", ".cpp", ".py")}


@needs_compiler
def test_a_wheel_holds_the_library_and_the_sources_that_it_is_checked_against(tmp_path: Path) -> None:
    """Without the sources every installed library would count as built from others."""
    wheel = make_wheel(tmp_path, quick_compiler(tmp_path))
    assert sources() | {NATIVE + "kernels.so"} <= wheel.names
    zipfile.ZipFile(wheel.path).extractall(tmp_path / "installed")
    installed = runpy.run_path(str(tmp_path / "installed" / NATIVE / "build.py"))
    assert installed["is_current"]()


def test_a_wheel_without_a_compiler_holds_all_but_the_library(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "/nonexistent")
    assert sources() <= wheel.names
    assert not any(name.endswith(".so") for name in wheel.names)


def test_the_installer_rebuilds_an_older_library_in_an_environment_that_is_there(tmp_path: Path) -> None:
    """It runs at every start of the tests: nothing is set up anew while pyproject.toml and setup.py are as installed."""
    for name in ("pyproject.toml", "setup.py", "scripts/install.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script(tmp_path / ".venv" / "bin" / "python", f'echo "$@" >>{tmp_path}/called; exit 1')
    installer = [str(tmp_path / "scripts" / "install.sh")]
    environment = {**os.environ, "PYTHON": "/nonexistent"}
    made_from = (tmp_path / "pyproject.toml").read_text() + (tmp_path / "setup.py").read_text()
    (tmp_path / ".venv" / ".sgl_prefill_installed").write_text(made_from)
    ended = subprocess.run(installer, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, ""), "without a compiler too"
    assert (tmp_path / "called").read_text() == f"{NATIVE}build.py --if-needed\n"
    with (tmp_path / "setup.py").open("a") as setup:
        setup.write("\n")
    assert subprocess.run(installer, env=environment, capture_output=True).returncode != 0, "it sets up anew"
