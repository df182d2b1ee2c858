"""Wheels in parts for a machine without a registry, and whole again there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "wheelhouse.py"


@pytest.fixture
def wheelhouse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheelhouse", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "wheels"
    folder.mkdir()
    made = []
    for name, n_bytes in (("large", 250), ("half", 50), ("small", 20), ("other", 60)):
        made.append(folder / f"{name}.whl")
        made[-1].write_bytes(bytes(index * 7 % 251 for index in range(n_bytes)))
    return made


def test_no_part_is_too_large_and_together_they_are_all(
    wheelhouse: ModuleType, files: list[Path], tmp_path: Path
) -> None:
    """A wheel of two and a half parts is cut, small ones share a part."""
    contents = {file.name: file.read_bytes() for file in files}
    parts = wheelhouse.deal(files, tmp_path, 100)
    sizes = [sum(path.stat().st_size for path in part.iterdir()) for part in parts]
    assert max(sizes) <= 100
    assert sum(sizes) == sum(map(len, contents.values()))
    assert len(parts) == 4
    whole = wheelhouse.join(tmp_path)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == contents


def test_a_missing_part_is_named(wheelhouse: ModuleType, files: list[Path], tmp_path: Path) -> None:
    """Also where it held the last piece."""
    wheelhouse.deal(files, tmp_path, 100)
    (last,) = tmp_path.glob("part-*/large.whl.piece-3-of-3")
    last.unlink()
    with pytest.raises(ValueError, match=r"large.whl: pieces \[3\] of 3 are missing"):
        wheelhouse.join(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes up what is installed: the requirements of each name; all are version 1.0."""

    def pretend(**requires: list[str]) -> None:
        class Made:
            version = "1.0"

            def __init__(self, name: str) -> None:
                self.requires = requires[name.replace("-", "_")]

        def distribution(name: str) -> Made:
            try:
                return Made(name)
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr("importlib.metadata.distribution", distribution)

    return pretend


def test_what_is_required_is_followed_by_the_markers_of_the_other_machine(
    wheelhouse: ModuleType, installed: Callable[..., None]
) -> None:
    """Python 3.12 on Linux, whatever runs here; names are compared as pip does, and a circle ends."""
    installed(
        root=[
            "Some_Kernel>=1",
            "arm; platform_machine == 'aarch64'",
            "old; python_version < '3.12'",
            "optional; extra == 'x'",
        ],
        some_kernel=["new; python_version >= '3.12' and sys_platform == 'linux'", "root"],
        new=[],
    )
    assert wheelhouse.required(["root"], "3.12") == ["new==1.0", "root==1.0", "some-kernel==1.0"]


def test_an_extra_that_is_asked_for_is_followed_wherever_it_is_asked(
    wheelhouse: ModuleType, installed: Callable[..., None]
) -> None:
    """Also where the distribution itself was seen before without it."""
    installed(
        root=["toolkit[first]", "late"],
        toolkit=["one; extra == 'first'", "two; extra == 'second'", "three; extra == 'third'"],
        late=["toolkit[second]"],
        one=[],
        two=[],
    )
    found = wheelhouse.required(["root"], "3.12")
    assert found == ["late==1.0", "one==1.0", "root==1.0", "toolkit==1.0", "two==1.0"]


def test_what_the_other_machine_has_is_left_out_with_what_it_alone_requires(
    wheelhouse: ModuleType, installed: Callable[..., None]
) -> None:
    """Two gigabytes of CUDA libraries need not follow a PyTorch that is there; what others require too does."""
    installed(root=["torch", "shared"], torch=["cublas", "shared"], cublas=[], shared=[])
    assert wheelhouse.required(["root"], "3.12", ["Torch"]) == ["root==1.0", "shared==1.0"]


def test_a_requirement_that_is_not_installed_here_is_asked_for_as_it_is_required(
    wheelhouse: ModuleType, installed: Callable[..., None]
) -> None:
    """It is not left out silently: a download without a pinned version, or a failure that is named."""
    installed(root=["absent>=2; python_version >= '3.12'"])
    assert wheelhouse.required(["root"], "3.12") == ["absent>=2", "root==1.0"]


def test_the_wheelhouse_holds_what_only_a_cuda_server_imports(wheelhouse: ModuleType) -> None:
    """By the installed metadata: kernels, compilers and libraries that a CPU never touches, and nothing for other machines."""
    names = {one.partition("==")[0] for one in wheelhouse.required(wheelhouse.ROOTS, "3.12")}
    assert {
        "sglang-kernel",
        "flashinfer-python",
        "sgl-deep-gemm",
        "triton",
        "nvidia-cutlass-dsl",
        "flash-attn-4",
    } <= names
    assert {"nvidia-cudnn-frontend", "cuda-tile", "nccl4py", "nvidia-cublas", "nvidia-cudnn-cu13"} <= names
    assert {"ninja", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"} <= names, (
        "kernels are compiled there"
    )
    assert {"httptools", "pytest", "hypothesis", "matplotlib"} <= names
    assert not {"av", "decord2", "ruff", "mypy", "ray"} & names


def test_the_page_of_the_parts_names_every_file_once(wheelhouse: ModuleType, files: list[Path], tmp_path: Path) -> None:
    """Under its part, with the part's size."""
    parts = wheelhouse.deal(files, tmp_path, 100)
    lines = wheelhouse.contents_of(parts).splitlines()
    assert [line.strip() for line in lines if line.startswith("  ")] == [
        path.name for part in parts for path in sorted(part.iterdir())
    ]
    assert [line.partition(",")[0] for line in lines if not line.startswith("  ")] == [part.name for part in parts]


def test_a_distribution_without_a_wheel_is_named_and_the_others_are_dealt(
    wheelhouse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1, and `contents.txt` lists what there is."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        name = command[-1].partition("==")[0]
        if name == "b":
            return subprocess.CompletedProcess(command, 1)
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        (folder / f"{Path(name).name}.whl").write_text(name)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(wheelhouse, "required", lambda *_: ["a==1.0", "b==1.0", "sgl-prefill==0.1.0"])
    monkeypatch.setattr("sys.argv", ["wheelhouse.py", "--out", str(tmp_path)])
    assert wheelhouse.main() == 1
    printed = capsys.readouterr()
    assert "no wheel for Python 3.12: b==1.0" in printed.err
    assert (tmp_path / "contents.txt").read_text() == printed.out
    assert "  a.whl\n" in printed.out
    assert "sgl-prefill.whl" not in printed.out
