"""The patches against SGLang's own code fit the installed version, and their table names each of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PATCH_FILES = sorted(PATCHES.glob("*.patch"))


def site_packages() -> Path:
    """The folder that holds the installed `sglang`, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def touched_files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)


def copy_touched_files(patches: list[Path], folder: Path) -> list[Path]:
    """Copies of the installed files that the patches touch, in the layout that `-p1` expects."""
    copies = []
    for name in sorted({name for patch in patches for name in touched_files(patch)}):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_packages() / name, copy)
        copies.append(copy)
    assert copies
    return copies


def git_apply(patch: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply`, which takes no fuzz, kept from any repository around the folder: it would skip files outside it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    command = ["git", "apply", "-p1", *options, str(patch)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("patch", PATCH_FILES, ids=lambda patch: patch.stem)
def test_patch_applies_to_the_installed_sglang(patch: Path, tmp_path: Path) -> None:
    """Each patch applies alone, without fuzz, to the installed SGLang."""
    copy_touched_files([patch], tmp_path)
    result = git_apply(patch, tmp_path, "--check")
    assert result.returncode == 0, result.stderr


def test_patches_apply_in_order_and_still_parse(tmp_path: Path) -> None:
    """All patches apply one after another, each touched file changes, and each still parses."""
    copies = copy_touched_files(PATCH_FILES, tmp_path)
    stock = {copy: copy.read_text(encoding="utf-8") for copy in copies}
    for patch in PATCH_FILES:
        result = git_apply(patch, tmp_path)
        assert result.returncode == 0, f"{patch.name}: {result.stderr}"
    for copy in copies:
        patched = copy.read_text(encoding="utf-8")
        assert patched != stock[copy], copy.name
        compile(patched, str(copy), "exec")


def test_readme_names_each_patch_and_no_other() -> None:
    """The table in the README has one row for each patch file that exists, and links to it."""
    readme = (PATCHES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([^\]]+)\] \|", readme, flags=re.MULTILINE)
    links = re.findall(r"^\[([^\]]+)\]: (\S+)$", readme, flags=re.MULTILINE)
    assert rows == [number for number, _ in links]
    assert [name for _, name in links] == [patch.name for patch in PATCH_FILES]
    assert rows
