"""How the library of native kernels is found and checked at start, and what is said where it cannot serve."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_prefill.cpu.native import build, calls, library
from sgl_prefill.cpu.native.calls import Kernels
from sgl_prefill.errors import ConfigurationError


def has_compiler() -> bool:
    return bool(os.environ.get("CXX")) or any(shutil.which(name) for name in build.COMPILERS)


def test_the_library_is_there_where_a_compiler_is() -> None:
    """Else every test of the kernels would skip in silence."""
    if not has_compiler():
        pytest.skip("there is no C++ compiler")
    found = library.find("auto")
    assert found.kernels is not None, found.reason


def test_the_best_build_is_chosen_and_the_plain_one_runs_everywhere(kernels: Kernels) -> None:
    names = [known.name for known in (*build.X86_BUILDS, build.PLAIN)]
    with pytest.raises(ConfigurationError) as error:
        library.find("none such")
    running = str(error.value).rpartition("one of ")[2].split(", ")
    assert kernels.build == running[0]
    assert running == [name for name in names if name in running]
    assert running[-1] == "plain"
    assert library.find("plain").shown() == {"build": "plain", "reason": None}


def test_python_declares_the_structures_of_interface_h() -> None:
    """The same fields in the same order, of the same types, sizes and offsets."""

    def code(declaration: str) -> str:
        return "p" if "*" in declaration else {"int32_t": "i", "int64_t": "l", "float": "f"}[declaration.split()[0]]

    header = " ".join(re.sub("//.*", "", (build.FOLDER / "interface.h").read_text()).split())
    attention, table = (re.split(rf"struct {name} {{(.*?) }};", header)[1] for name in ("Attention", "Build"))
    fields = [
        (name, code(c_type))
        for c_type, names in re.findall(r"((?:const )?\w+\*?) ([\w, ]+);", attention)
        for name in names.split(", ")
    ]
    functions = [
        (name, "".join(map(code, parameters.split(", "))))
        for name, parameters in re.findall(r"int \(\*(\w+)\)\((.*?)\);", table)
    ]
    codes = {c_type: code for code, c_type in calls._CODES.items()}
    ours: Any = calls._Attention._fields_
    our_table: Any = calls.BuildTable._fields_
    assert fields == [(name, codes[c_type]) for name, c_type in ours]
    assert functions == [
        (name, "".join(codes[argument] for argument in c_type._argtypes_))
        for name, c_type in our_table
        if hasattr(c_type, "_argtypes_")
    ]
    structures: dict[str, Any] = {"Attention": calls._Attention, "Build": calls.BuildTable}
    layout = re.findall(r"sizeof\((\w+)\) == (\d+)", header)
    assert dict(layout) == {name: str(ctypes.sizeof(structure)) for name, structure in structures.items()}
    for name, field, offset in re.findall(r"offsetof\((\w+), (\w+)\) == (\d+)", header):
        assert getattr(structures[name], field).offset == int(offset), field


def test_off_says_that_it_is() -> None:
    assert library.find("off") == library.Native(None, "PREFILL_CPU_KERNEL is off")


def test_a_build_that_does_not_run_here_is_a_configuration_error(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the variable, what it is and what it may be."""
    monkeypatch.setenv("PREFILL_CPU_KERNEL", "sve2")
    with pytest.raises(
        ConfigurationError, match=r"PREFILL_CPU_KERNEL is 'sve2', and here .* auto, off, or one of .*plain"
    ):
        library.native.__wrapped__()


def no_file(path: Path) -> None:
    assert not path.exists()


def no_library(path: Path) -> None:
    path.write_text("int main() { return 0; }\n")


def foreign_library(path: Path) -> None:
    shutil.copy(_ctypes.__file__, path)


def other_sources(path: Path) -> None:
    shutil.copy(build.LIBRARY, path)


@pytest.mark.parametrize(
    ("make", "digest", "reason"),
    [
        (no_file, None, r"they were not built when the package was installed: with a C\+\+ compiler, run"),
        (no_library, None, r"kernels.so cannot be loaded \(.*\): run"),
        (foreign_library, None, r"kernels.so is not this package's \(.*\): run"),
        (other_sources, "another", "kernels.so was built from other sources: run"),
    ],
)
def test_a_library_that_cannot_serve_is_a_reason_with_the_remedy(
    make: Callable[[Path], None],
    digest: str | None,
    reason: str,
    kernels: Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's kernels serve then, with a warning; a build asked for by name is an error instead."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels.so")
    make(tmp_path / "kernels.so")
    if digest is not None:
        monkeypatch.setattr(library, "digest", lambda: digest)
    found = library.find("auto")
    assert found.kernels is None
    assert re.search(f"{reason} `python -m sgl_prefill.cpu.native.build`", str(found.reason))
    with pytest.raises(ConfigurationError, match=f"PREFILL_CPU_KERNEL is 'plain', and {reason}"):
        library.find("plain")


def test_pytorch_serving_instead_is_logged_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels.so")
    monkeypatch.delenv("PREFILL_CPU_KERNEL", raising=False)
    assert library.native.__wrapped__().kernels is None
    assert "PyTorch's own kernels serve" in caplog.text
    assert library.REBUILD in caplog.text


def half(x: Any) -> None:
    x.mul_(0.5)


def nan_in_one_place(x: Any) -> None:
    x.view(-1)[0] = torch.nan


@pytest.mark.parametrize("spoil", [half, nan_in_one_place])
@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("attention", 4),
        ("rms_norm", None),
        ("gated", None),
        ("rotate", 0),
        ("store", 1),
        ("logits", None),
        ("product", None),
    ],
)
def test_a_broken_kernel_is_found_out_at_start(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, name: str, result: int | None, spoil: Callable[[Any], None]
) -> None:
    """Wrong by half, or NaN in one place. result: the argument that the kernel writes, None where it returns the result.

    A NaN of the attention kernel once went unnoticed: Python's max(0.0, nan) is 0.0.
    """
    if name == "product" and not kernels.fits_product(torch.empty((32, 32), dtype=torch.bfloat16)):
        pytest.skip("this build leaves products to oneDNN")
    original = getattr(Kernels, name)

    def broken(self: Kernels, *args: Any, **kwargs: Any) -> Any:
        returned = original(self, *args, **kwargs)
        spoil(returned if result is None else args[result])
        return returned

    monkeypatch.setattr(Kernels, name, broken)
    found = library.find("auto")
    assert found.kernels is None
    assert re.search(
        rf"self-test of build {kernels.build} failed \({name} in torch.bfloat16 is off by .*please report",
        str(found.reason),
    )
    if name == "product":
        return  # which the plain build does not have
    with pytest.raises(ConfigurationError, match=r"PREFILL_CPU_KERNEL is 'plain'.*self-test of build plain failed"):
        library.find("plain")


@pytest.mark.skipif(not has_compiler() or shutil.which("nm") is None, reason="needs a C++ compiler and nm")
def test_builds_share_no_code_by_name(tmp_path: Path) -> None:
    """A weak symbol of the same name in two builds is linked once, with one processor's instructions for all.

    Names of a build's namespace are its own; DW.ref.* are pointers of the C++ runtime.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(None, map(shutil.which, build.COMPILERS)))]
    tried = []
    for known in (build.PLAIN, *build.X86_BUILDS[:1]):
        made = tmp_path / f"{known.name}.o"
        flags = [*build.FLAGS, *known.flags, f"-DSGL_PREFILL_BUILD={known.name}"]
        command = [*compiler, *flags, "-c", str(build.FOLDER / "build.cpp"), "-o", str(made)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            continue
        listed = subprocess.run(["nm", "-C", str(made)], capture_output=True, text=True, check=True).stdout
        weak = [line.split(maxsplit=2)[2] for line in listed.splitlines() if re.search(r"^\S+ [VWu] ", line)]
        shared = [name for name in weak if not re.search(rf"\b{known.name}::", name) and not name.startswith("DW.ref.")]
        assert shared == []
        tried.append(known.name)
    assert tried[0] == "plain"
