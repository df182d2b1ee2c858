"""The kit for a GPU machine without a package index: which device code stays, the archives, and the shell that uses them."""

from __future__ import annotations

import importlib.metadata
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_kit

ROOT = Path(__file__).resolve().parents[2]
HOST_CODE = b"host code " * 100
MAINLOOP = b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJEEELi%dENS_10bfloat16_tE"


def image(capability: int, code: bytes, kind: int = 2, flags: int = 0) -> bytes:
    """An entry of a fat binary, 64 bytes before its code."""
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0, 64, len(code))
    struct.pack_into("<I", header, 28, capability)
    struct.pack_into("<Q", header, 40, flags)
    return bytes(header) + code


def library(folder: Path, name: str, *images: bytes) -> Path:
    code = b"".join(images)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code
    path.write_bytes(HOST_CODE + fat + HOST_CODE + fat + HOST_CODE)
    return path


def test_of_a_library_only_what_hopper_loads_stays(tmp_path: Path) -> None:
    """PTX, other cards, and the folder of another card go; sizes, places and host code do not change."""
    images = (
        image(80, b"ampere" * 50),
        image(90, b"hopper" * 50),
        image(90, b"ptx" * 50, kind=1),
        image(100, b"b200" * 50),
    )
    path = library(tmp_path, "common_ops.so", *images)
    before = path.read_bytes()
    assert gpu_kit.trim(path) == 2 * 300
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after.count(HOST_CODE) == 3
    assert [after.count(word) for word in (b"ampere", b"hopper", b"ptx", b"b200")] == [0, 100, 0, 0]
    assert [one.capability for one in gpu_kit.images(after)] == 2 * [80, 90, 80, 100], (
        "no emptied image is taken for Hopper's"
    )
    assert gpu_kit.trim(library(tmp_path / "sm100", "common_ops.so", image(90, b"hopper"))) == 0


@pytest.mark.parametrize(
    ("code", "flags", "stays"),
    [
        (MAINLOOP % 64, 0, (True, True)),
        (MAINLOOP % 128, 0, (True, True)),
        (MAINLOOP % 256, 0, (False, False)),
        (MAINLOOP % 128, 0x8000, (False, False)),
        ((MAINLOOP % 128).replace(b"10bfloat16_t", b"12float_e4m3_t"), 0, (False, True)),
        ((MAINLOOP % 128).replace(b"10bfloat16_t", b"6half_t"), 0, (False, False)),
        (b"CollectiveMainloopFwdSm80", 0, (False, False)),
        (b"prepare_varlen_num_blocks", 0, (True, True)),
    ],
)
def test_of_flash_attention_bfloat16_with_heads_of_64_and_128_stays(
    code: bytes, flags: int, stays: tuple[bool, bool]
) -> None:
    """And helpers of all; with FP8 those too."""
    assert (gpu_kit.serves(code, flags), gpu_kit.serves(code, flags, is_fp8=True)) == stays


def test_all_that_the_kit_names_is_installed() -> None:
    """In the versions of this environment, in which the tests have run."""
    for name in (*gpu_kit.PACKAGES.split(), *gpu_kit.FP8_PACKAGES):
        assert importlib.metadata.version(name)


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for name in (
        "sgl_kernel/__init__.py",
        "sglang_kernel-0.dist-info/METADATA",
        "tvm_ffi.py",
        "jit/tvm-ffi/a.so",
        "other.py",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("here = True\n")
    gpu_kit.pack(tree, tmp_path / "kit")
    return tmp_path / "kit"


def sourced(archives: Path, home: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KIT_HOME": str(home),
        "HOME": str(home),
    }
    shell = ["bash", "-c", f". scripts/gpu_setup.sh {archives} && {command}"]
    return subprocess.run(shell, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_a_shell_finds_the_kit_and_the_plug_in_of_the_checkout(archives: Path, tmp_path: Path) -> None:
    """Twice: the second does not need the archives."""
    (archives / "kit-2.tar.xz").rename(tmp_path / "later")
    find = (
        "python3 -c 'import importlib.metadata as m, sgl_kernel, tvm_ffi;"
        ' print(sgl_kernel.here, [one.value for one in m.entry_points(group="sglang.srt.plugins")])\''
    )
    for _ in range(2):
        done = sourced(archives, tmp_path / "home", find)
        assert done.returncode == 0, done.stderr
        assert "True ['sgl_prefill" in done.stdout
        for archive in archives.glob("*.xz"):
            archive.unlink()
    assert not (tmp_path / "home" / "other.py").exists()


def test_an_archive_that_was_cut_off_is_refused(archives: Path, tmp_path: Path) -> None:
    path = archives / "kit-1.tar.xz"
    path.write_bytes(path.read_bytes()[:-10])
    done = sourced(archives, tmp_path / "home", "echo went on")
    assert "went on" not in done.stdout
    assert "kit-1.tar.xz is not the one of SHA256SUMS" in done.stderr
