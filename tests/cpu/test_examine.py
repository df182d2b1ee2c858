"""What a start finds of the machine: a CUDA toolkit and driver, FlashInfer, a container's memory."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.startup import arguments, examine

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
    monkeypatch.setattr(examine, "packaged_toolkit", lambda: toolkit)
    return toolkit


def environment_without(tmp_path: Path) -> dict[str, str]:
    """Of a machine on which neither nvcc nor ninja is on PATH."""
    return {"PATH": str(tmp_path / "empty")}


def test_the_packages_are_a_toolkit_where_there_is_no_other(packaged: Path, tmp_path: Path) -> None:
    """With nvcc, headers, and the libraries under the names that a linker looks for, in the folder where it does; also twice."""
    environment = environment_without(tmp_path)
    for _ in range(2):
        examine.prepare_cuda(environment, tmp_path / "none")
    home = Path(environment["CUDA_HOME"])
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc"):
        assert (home / name).read_text() == name
    assert (home / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (home / "lib64" / "libcudart_static.a").exists()


def toolkit_in(home: Path, *, has_libraries: bool = True) -> Path:
    """A toolkit, or the folder of a wrapper called nvcc."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("")
    (home / "bin" / "nvcc").chmod(0o755)
    if has_libraries:
        (home / "lib64").mkdir()
        (home / "lib64" / "libcudart.so").write_text("")
    return home


def test_a_toolkit_that_sglang_finds_by_itself_stays(packaged: Path, tmp_path: Path) -> None:
    """In CUDA_HOME, in CUDA_PATH, on PATH, or where it most often is."""
    programs = toolkit_in(tmp_path / "toolkit") / "bin"
    usual = tmp_path / "none"
    for environment in ({"CUDA_HOME": "/a"}, {"CUDA_PATH": "/a"}, {"PATH": str(programs)}):
        examine.prepare_cuda(environment, usual)
        assert environment.get("CUDA_HOME", "/a") == "/a"
        assert "NVCC_PREPEND_FLAGS" not in environment
    environment = environment_without(tmp_path)
    examine.prepare_cuda(environment, toolkit_in(tmp_path / "usual"))
    assert "CUDA_HOME" not in environment


def test_a_wrapper_of_nvcc_is_no_toolkit(packaged: Path, tmp_path: Path) -> None:
    """/usr/local/bin/nvcc led SGLang to link with -L/usr/local/lib64: the usual toolkit is named, or the packages'."""
    wrapper = toolkit_in(tmp_path / "wrapper", has_libraries=False)
    usual = toolkit_in(tmp_path / "usual")
    environment = {"PATH": str(wrapper / "bin")}
    examine.prepare_cuda(environment, usual)
    assert environment["CUDA_HOME"] == str(usual)
    environment = {"PATH": str(wrapper / "bin")}
    examine.prepare_cuda(environment, tmp_path / "none")
    assert (Path(environment["CUDA_HOME"]) / "lib64" / "libcudart.so").exists()


def test_a_compiler_of_another_minor_version_than_the_headers_may_compile(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13.5 and 13.0, which SGLang's dependencies install: the headers refused it. A user's own flags stay."""
    versions = {examine.COMPILER: "13.5.37", examine.HEADERS: "13.0.96"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    environment = {**environment_without(tmp_path), "NVCC_PREPEND_FLAGS": "-g"}
    examine.prepare_cuda(environment, tmp_path / "none")
    assert environment["NVCC_PREPEND_FLAGS"] == f"-g {examine.MIXED_VERSIONS}"
    versions[examine.COMPILER] = "13.0.88"
    environment = environment_without(tmp_path)
    examine.prepare_cuda(environment, tmp_path / "none")
    assert "NVCC_PREPEND_FLAGS" not in environment


def test_ninja_of_an_environment_that_nobody_has_activated_is_found(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer runs it by its bare name. Where there is none PATH stays, and a line says so."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    environment = environment_without(tmp_path)
    examine.prepare_cuda(environment, tmp_path / "none")
    assert environment["PATH"] == str(tmp_path / "empty")
    assert "there is no ninja" in caplog.text
    (tmp_path / "ninja").write_text("")
    examine.prepare_cuda(environment, tmp_path / "none")
    assert environment["PATH"] == f"{tmp_path}{os.pathsep}{tmp_path / 'empty'}"


def test_where_there_is_no_compiler_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is set."""
    monkeypatch.setattr(examine, "packaged_toolkit", lambda: None)
    environment = environment_without(tmp_path)
    examine.prepare_cuda(environment, tmp_path / "none")
    assert "CUDA_HOME" not in environment
    assert "name its folder in CUDA_HOME, or `pip install nvidia-cuda-nvcc" in caplog.text


def test_the_driver_is_linked_with_the_file_that_is_loaded(packaged: Path, tmp_path: Path) -> None:
    """flashinfer links with libcuda, of which a machine with a driver may have `libcuda.so.1` alone."""
    maps = ["7f00 r--p 0 0 0 /usr/lib/libc.so.6", "7f01 r-xp 0 0 0 /usr/lib64/libcuda.so.580.65.06"]
    driver = examine._mapped_file(maps)
    assert driver == Path("/usr/lib64/libcuda.so.580.65.06")
    home = examine.link_toolkit(packaged, tmp_path / "home", driver)
    assert (home / "lib64" / "libcuda.so").readlink() == driver


def test_a_shell_gets_what_the_launcher_sets(tmp_path: Path) -> None:
    """From the installed packages: what is printed can be evaluated."""
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sgl_prefill.startup.examine"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    assert all(words[0] == "export" and "=" in words[1] for words in lines)


def test_deepgemm_compiles_typical_sizes_alone_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests run in one piece SGLang knows no limit, and compiles 65,536 kernels of each shape of weights."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils
    from sglang.srt.runtime_context import get_context

    monkeypatch.setenv(examine.FAST_WARM_UP, "")
    monkeypatch.delenv(examine.FAST_WARM_UP)
    monkeypatch.setattr(examine, "_prepare_toolkit", lambda *_: None)
    monkeypatch.setattr(compile_utils, "_BUILTIN_M_LIST", [])
    n_kernels = {}
    for says in ("", "1", "0"):
        if says:
            monkeypatch.setenv(examine.FAST_WARM_UP, says)
        before = envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get()
        examine.prepare_cuda()
        monkeypatch.setattr(compile_utils, "_FAST_WARMUP", envs.SGLANG_JIT_DEEPGEMM_FAST_WARMUP.get())
        with get_context().override_server_args(chunked_prefill_size=-1):
            compile_utils.update_deep_gemm_config(0)
        n_kernels[says] = (before, len(compile_utils._BUILTIN_M_LIST))
    assert n_kernels == {"": (False, 3072), "1": (True, 3072), "0": (False, 65_536)}


def test_the_launcher_says_so_before_anything_of_sglang_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads the variable once, when its module is imported, in a process that is forked first of all."""
    from sgl_prefill import launch_server
    from sgl_prefill.entry import launch, prefork

    class BegunError(Exception):
        pass

    def begin() -> None:
        assert os.environ[examine.FAST_WARM_UP] == "1"
        raise BegunError

    monkeypatch.setenv(examine.FAST_WARM_UP, "")
    monkeypatch.delenv(examine.FAST_WARM_UP)
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    monkeypatch.setattr(examine, "driver_problems", lambda _: [])
    monkeypatch.setattr(examine, "_prepare_toolkit", lambda *_: None)
    monkeypatch.setattr(prefork, "begin", begin)
    monkeypatch.setattr(launch, "server_args_of", lambda _: pytest.fail("too late"))
    with pytest.raises(BegunError):
        launch_server.parse(["--model-path", "org/model", "--port", "39999"])


@pytest.mark.parametrize(
    ("has_card", "driver", "torch_cuda", "expected"),
    [
        (False, None, "13.0", None),
        (True, 13020, None, None),
        (True, 13000, "13.0", None),
        (
            True,
            12080,
            "13.0",
            "supports CUDA 12.8, and the installed PyTorch is for CUDA 13.0: update NVIDIA's driver to 580",
        ),
        (True, None, "13.0", "--gpus all"),
    ],
)
def test_a_driver_that_is_too_old_is_named_with_all_other_complaints(
    monkeypatch: pytest.MonkeyPatch, has_card: bool, driver: int | None, torch_cuda: str | None, expected: str | None
) -> None:
    """PyTorch would take the machine for one without a GPU, and the server would run on the CPU without a word."""
    monkeypatch.setattr(examine, "has_card", lambda: has_card)
    monkeypatch.setattr(examine, "driver_version", lambda: driver)
    monkeypatch.setattr("torch.version.cuda", torch_cuda)
    problems = arguments.check_argv(PrefillConfig(), ["--model-path", "/no/such"], listens=False)
    assert len(problems) == 1 + (expected is not None)
    assert expected is None or expected in problems[0]
    assert "--model-path /no/such does not exist" in problems[-1]


NEEDED = "0.7.2"
Install = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Names the versions that pip has installed, by packages; SGLang wants what it does."""
    monkeypatch.delenv(examine.UNCHECKED, raising=False)

    def install(**packages: str) -> None:
        def version(name: str) -> str:
            try:
                return packages[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        requires = ["torch==2.14.1", f"flashinfer_python[cu13]=={NEEDED}", "numpy"]
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: requires)

    return install


def test_it_is_the_version_that_this_sglang_requires() -> None:
    """Read from its own metadata, so that another release of SGLang needs no change here."""
    assert examine._needed_flashinfer() == NEEDED


def test_a_missing_package_is_named_with_both_remedies(installed: Install) -> None:
    """And asked for only where attention runs in it."""
    installed()
    (problem,) = examine.flashinfer_problems(["flashinfer", None])
    assert "flashinfer-python is not installed" in problem
    assert f"pip install 'flashinfer-python[cu13]=={NEEDED}'" in problem
    assert "--attention-backend triton" in problem
    assert examine.flashinfer_problems(["fa3", "triton", None]) == []


@pytest.mark.parametrize(
    ("found", "is_fine"), [("0.6.15.post1", False), ("0.7.1", False), (NEEDED, True), ("0.8.0", True)]
)
def test_an_older_package_is_named_with_what_is_there_and_what_is_needed(
    installed: Install, found: str, is_fine: bool
) -> None:
    """A post-release counts; a newer one is SGLang's to refuse."""
    installed(flashinfer_python=found)
    problems = examine.flashinfer_problems(["flashinfer"])
    assert len(problems) == (not is_fine)
    for problem in problems:
        assert problem.startswith(
            f"flashinfer-python {found} is installed, and SGLang needs {NEEDED}: run `pip install"
        )


def test_who_has_built_packages_of_their_own_can_say_so(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGLang's variable for it."""
    installed()
    monkeypatch.setenv(examine.UNCHECKED, "true")
    assert examine.flashinfer_problems(["flashinfer"]) == []


@pytest.mark.parametrize("kind", ["attention_backend", "prefill_attention_backend"])
def test_a_start_on_a_gpu_ends_with_that_message(
    installed: Install, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before any process is started, with all other complaints; SGLang looks only at --attention-backend, and ends with a
    traceback. On a host nobody asks."""
    installed(flashinfer_python="0.6.3")
    config = PrefillConfig()
    fields: dict[str, Any] = {need.field: need.value for need in arguments.required_for(config)}
    backends = {"attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": None}
    others = {"page_size": 1, "is_embedding": False, "tp_size": 1, "model_path": "m", "enable_trace": False}
    server_args = SimpleNamespace(**{**fields, **backends, **others, kind: "flashinfer"})
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    with pytest.raises(
        ConfigurationError, match=re.escape(f"flashinfer-python 0.6.3 is installed, and SGLang needs {NEEDED}")
    ):
        arguments.check_server_args(config, server_args, listens=False)
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: False)
    arguments.check_server_args(config, server_args, listens=False)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_the_group_with_least_left_counts_and_pages_of_files_are_free(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/pod/job\n")
    root = system / "sys/fs/cgroup"
    stat = "anon 50\nfile 30\ninactive_file 20\nactive_file 5\n"
    write(root / "pod/job", memory__max="max\n", memory__current="70\n", memory__stat=stat)
    assert examine.container_free_bytes(system) == math.inf
    write(root / "pod", memory__max="100\n", memory__current="90\n", memory__stat=stat)
    assert examine.container_free_bytes(system) == 100 - (90 - 25)
    write(root / "pod/job", memory__max="80\n")
    assert examine.container_free_bytes(system) == 80 - (70 - 25)


def test_the_older_interface_and_a_container_whose_group_is_the_root(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/docker/7f\n0::/\n")
    write(
        system / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="400",
        memory__stat="cache 300\ntotal_inactive_file 100\ntotal_active_file 200\n",
    )
    assert examine.container_free_bytes(system) == 1000 - 100


def test_a_group_over_its_limit_has_nothing_left_and_no_groups_are_no_limit(system: Path) -> None:
    assert examine.container_free_bytes(system) == math.inf
    (system / "proc/self/cgroup").write_text("0::/\n")
    write(system / "sys/fs/cgroup", memory__max="10", memory__current="20", memory__stat="")
    assert examine.container_free_bytes(system) == 0
