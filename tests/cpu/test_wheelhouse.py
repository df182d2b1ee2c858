"""Wheels in parts for a machine without a registry, and whole again there."""

from __future__ import annotations

import importlib.util
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
