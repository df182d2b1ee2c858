"""The table of what another release of SGLang changes of the targets of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_sglang import Release, change, main

BEFORE = {
    "cache.py": (
        "class Base:\n    def evict(self):\n        return 1\n\n\n"
        "class Cache(Base):\n    def match(self, key):\n        return key\n"
    ),
    "entry.py": "from sglang.srt.cache import Cache\n\n\ndef start(cache):\n    cache.size = 1\n    return cache\n",
}
AFTER = {
    "tree.py": "class Cache:\n    def match(self, key, salt):\n        found = key\n        return found\n",
    "cache.py": "from sglang.srt.tree import Cache\n",
    "entry.py": "from sglang.srt.cache import Cache\n\n\ndef start(cache):\n    cache.size = 1\n    return cache\n",
}


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Release, Release]:
    for name, files in (("before", BEFORE), ("after", AFTER)):
        for file, text in files.items():
            path = tmp_path / name / "sglang" / "srt" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return Release(tmp_path / "before"), Release(tmp_path / "after")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("entry.start", "same"),
        ("entry.Cache.match", "+3 -2 of 2 lines, **signature**, now in `sglang.srt.tree.match`"),
        ("cache.Cache.evict", "**gone**"),
        ("cache.Nothing", "not found in the release that is installed here"),
    ],
)
def test_what_changed_of_a_target(releases: tuple[Release, Release], target: str, expected: str) -> None:
    """Found through imports and base classes, and also where it has moved."""
    assert change(*(release.find(f"sglang.srt.{target}") for release in releases)) == expected


def test_attributes_are_counted_by_files(releases: tuple[Release, Release]) -> None:
    assert [release.count("size") for release in releases] == [1, 1]
    assert [release.count("evict") for release in releases] == [0, 0]


def test_the_installed_release_has_every_target_and_differs_in_none_from_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import sglang

    assert main([str(Path(sglang.__file__).parents[1])]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[2:] if not line.startswith("| attribute")]
    assert len(lines) > 100
    assert [line for line in lines if not line.endswith("| same |")] == []
