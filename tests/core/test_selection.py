"""Which tests run by default."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import selection
from tests.selection import BUDGETS_S, RARE, ROOT


def test_the_lists_name_what_exists() -> None:
    for test, covers in RARE.items():
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or f"def {name}(" in (ROOT / file).read_text(), test
        assert covers
        for path in covers:
            assert (ROOT / path).exists(), path
    for file in BUDGETS_S:
        assert (ROOT / file).is_file(), file


def test_every_test_of_a_benchmark_a_script_or_patches_is_rare() -> None:
    """Found by what a file imports or runs."""
    about_tools = re.compile(r"^(import|from) (ray|playwright|benchmarks\.harness|benchmarks\.gpu_\w+)\b", re.M)
    runs_a_script = re.compile(r'"(scripts|patches)" ?/|/ "(scripts/\w+|patches)"')
    for path in (ROOT / "tests").glob("c*/test_*.py"):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if path.name != "test_documents.py" and (about_tools.search(text) or runs_a_script.search(text)):
            assert name in RARE, f"add {name} to RARE in tests/selection.py, with the paths that it covers"


@pytest.mark.parametrize(
    ("changed", "is_left_out"),
    [
        ([], True),
        (["sgl_prefill/ray_other.py", "README.md"], True),
        (["sgl_prefill/ray/scorer.py"], False),
        (["tests/integration/test_ray.py"], False),
    ],
)
def test_a_rare_test_runs_where_it_or_what_it_covers_changed(changed: list[str], is_left_out: bool) -> None:
    assert ("tests/integration/test_ray.py" in selection.left_out(changed)) is is_left_out


def test_changes_are_those_since_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clone of main compares with HEAD's first parent; a folder without git has no changes."""

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True
        )

    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.delenv(selection.SINCE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert selection.changed_files() == set()
    git("init", "-q", "-b", "main")
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", name)
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert selection.changed_files() == {"second"}
    git("update-ref", "refs/remotes/origin/main", "HEAD^")
    (tmp_path / "third").write_text("")
    assert selection.changed_files() == {"second", "third"}
    monkeypatch.setenv(selection.SINCE, "HEAD")
    assert selection.changed_files() == {"third"}


def test_a_file_over_three_times_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS_S, "tests/long.py", 100.0)
    assert selection.over_budget({"tests/long.py": 299.0, "tests/short.py": 59.0}) == []
    (sentence,) = selection.over_budget({"tests/long.py": 301.0})
    assert "took 301 s; its budget is 100 s and the limit 300 s" in sentence
