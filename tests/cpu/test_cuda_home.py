"""A CUDA toolkit for what SGLang compiles, where only NVIDIA's packages are installed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill import cuda_home

FILES = ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the packages install, and a cache folder of this test's own."""
    toolkit = tmp_path / "site-packages" / "nvidia" / "cu13"
    for name in FILES:
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).write_text(name)
    (toolkit / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_home, "packaged_toolkit", lambda: toolkit)
    return toolkit


def environment_without(tmp_path: Path) -> dict[str, str]:
    """Of a machine on which neither nvcc nor ninja is on PATH."""
    return {"PATH": str(tmp_path / "empty")}


def test_the_packages_are_a_toolkit_where_there_is_no_other(packaged: Path, tmp_path: Path) -> None:
    """With nvcc, headers, and the libraries under the names that a linker looks for, in the folder where it does; also twice."""
    environment = environment_without(tmp_path)
    for _ in range(2):
        cuda_home.prepare(environment, tmp_path / "none")
    home = Path(environment["CUDA_HOME"])
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc"):
        assert (home / name).read_text() == name
    assert (home / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (home / "lib64" / "libcudart_static.a").exists()


def test_a_toolkit_that_sglang_finds_by_itself_stays(packaged: Path, tmp_path: Path) -> None:
    """In CUDA_HOME, in CUDA_PATH, on PATH, or where it most often is."""
    programs = tmp_path / "toolkit" / "bin"
    programs.mkdir(parents=True)
    (programs / "nvcc").write_text("")
    (programs / "nvcc").chmod(0o755)
    usual = tmp_path / "none"
    for environment in ({"CUDA_HOME": "/a"}, {"CUDA_PATH": "/a"}, {"PATH": str(programs)}):
        cuda_home.prepare(environment, usual)
        assert environment.get("CUDA_HOME", "/a") == "/a"
        assert "NVCC_PREPEND_FLAGS" not in environment
    environment = environment_without(tmp_path)
    cuda_home.prepare(environment, tmp_path)
    assert "CUDA_HOME" not in environment


def test_a_compiler_of_another_minor_version_than_the_headers_may_compile(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13.5 and 13.0, which SGLang's dependencies install: the headers refused it. A user's own flags stay."""
    versions = {cuda_home.COMPILER: "13.5.37", cuda_home.HEADERS: "13.0.96"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    environment = {**environment_without(tmp_path), "NVCC_PREPEND_FLAGS": "-g"}
    cuda_home.prepare(environment, tmp_path / "none")
    assert environment["NVCC_PREPEND_FLAGS"] == f"-g {cuda_home.MIXED_VERSIONS}"
    versions[cuda_home.COMPILER] = "13.0.88"
    environment = environment_without(tmp_path)
    cuda_home.prepare(environment, tmp_path / "none")
    assert "NVCC_PREPEND_FLAGS" not in environment


def test_ninja_of_an_environment_that_nobody_has_activated_is_found(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer runs it by its bare name. Where there is none PATH stays, and a line says so."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    environment = environment_without(tmp_path)
    cuda_home.prepare(environment, tmp_path / "none")
    assert environment["PATH"] == str(tmp_path / "empty")
    assert "there is no ninja" in caplog.text
    (tmp_path / "ninja").write_text("")
    cuda_home.prepare(environment, tmp_path / "none")
    assert environment["PATH"] == f"{tmp_path}{os.pathsep}{tmp_path / 'empty'}"


def test_where_there_is_no_compiler_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is set."""
    monkeypatch.setattr(cuda_home, "packaged_toolkit", lambda: None)
    environment = environment_without(tmp_path)
    cuda_home.prepare(environment, tmp_path / "none")
    assert "CUDA_HOME" not in environment
    assert "name its folder in CUDA_HOME, or `pip install nvidia-cuda-nvcc" in caplog.text


def test_the_driver_is_linked_with_the_file_that_is_loaded(packaged: Path, tmp_path: Path) -> None:
    """flashinfer links with libcuda, of which a machine with a driver may have `libcuda.so.1` alone."""
    maps = ["7f00 r--p 0 0 0 /usr/lib/libc.so.6", "7f01 r-xp 0 0 0 /usr/lib64/libcuda.so.580.65.06"]
    driver = cuda_home._mapped_file(maps)
    assert driver == Path("/usr/lib64/libcuda.so.580.65.06")
    home = cuda_home.made_of(packaged, tmp_path / "home", driver)
    assert (home / "lib64" / "libcuda.so").readlink() == driver


def test_a_shell_gets_what_the_launcher_sets(tmp_path: Path) -> None:
    """From the installed packages: what is printed can be evaluated."""
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sgl_prefill.cuda_home"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    assert all(words[0] == "export" and "=" in words[1] for words in lines)


def test_deepgemm_compiles_typical_sizes_alone_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests run in one piece SGLang knows no limit, and compiles 65,536 kernels of each shape of weights."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    monkeypatch.setenv(cuda_home.FAST_WARM_UP, "")
    monkeypatch.delenv(cuda_home.FAST_WARM_UP)
    monkeypatch.setattr(compile_utils, "_BUILTIN_M_LIST", [])
    whole: Any = SimpleNamespace(chunked_prefill_size=-1, base_gpu_id=0)
    n_kernels = {}
    for says in ("", "1", "0"):
        if says:
            monkeypatch.setenv(cuda_home.FAST_WARM_UP, says)
        before = envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get()
        cuda_home.shorten_warm_up()
        monkeypatch.setattr(compile_utils, "_FAST_WARMUP", envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get())
        compile_utils.update_deep_gemm_config(0, whole)
        n_kernels[says] = (before, len(compile_utils._BUILTIN_M_LIST))
    assert n_kernels == {"": (False, 3072), "1": (True, 3072), "0": (False, 65_536)}


def test_the_launcher_says_so_before_anything_of_sglang_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads the variable once, when its module is imported, in a process that is forked first of all."""
    from sgl_prefill import cuda_driver, launch_server
    from sgl_prefill.port import launch, prefork

    class BegunError(Exception):
        pass

    def begin() -> None:
        assert os.environ[cuda_home.FAST_WARM_UP] == "1"
        raise BegunError

    monkeypatch.setenv(cuda_home.FAST_WARM_UP, "")
    monkeypatch.delenv(cuda_home.FAST_WARM_UP)
    monkeypatch.setattr("sgl_prefill.device.has_accelerator", lambda: True)
    monkeypatch.setattr(cuda_driver, "check", lambda: None)
    monkeypatch.setattr(cuda_home, "prepare", lambda: None)
    monkeypatch.setattr(prefork, "begin", begin)
    monkeypatch.setattr(launch, "server_args_of", lambda _: pytest.fail("too late"))
    with pytest.raises(BegunError):
        launch_server.parse(["--model-path", "org/model", "--port", "39999"])
