"""What another release of SGLang changes of all that this package hooks, overrides, sets or relies on, as a table.

    python -m scripts.compare_sglang FOLDER            # site-packages of an environment with the other release

To port:

1. `uv pip install sglang==X` into a new environment, and write this table.
2. Go through its rows: nothing to do for `same`, else read both sources and change our side.
3. Set SUPPORTED_SGLANG_VERSION and the pins of pyproject.toml; `scripts/fingerprints.py --write`, then `scripts/test.sh --all`.
4. Drop patches that are upstream (`patches/README.md`), and hooks for which SGLang has an interface by now.
5. Measure `benchmarks/two_commits` against the commit before.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sgl_prefill.entry.fingerprints import source_of
from sgl_prefill.entry.hooks import FEATURES
from sgl_prefill.http.routes import ROUTES

MOST_HOPS = 4  # of a name that is imported from module to module


class Found(NamedTuple):
    source: str
    place: str  # module and name, by which the object is defined


class Release:
    """Sources of one release, which need not be importable here."""

    def __init__(self, site_packages: Path) -> None:
        self._root = site_packages

    def find(self, target: str) -> Found | None:
        """Returns the function or class with a dotted path, through imports and base classes; None where there is none."""
        names = target.removesuffix(".fget").split(".")  # of a property
        for n in range(len(names) - 1, 0, -1):
            if self._file(".".join(names[:n])) is not None:
                return self._inside(".".join(names[:n]), names[n:], MOST_HOPS)
        return None

    def count(self, attribute: str) -> int:
        """Files in which an attribute of this name is read or set."""
        word = re.compile(rf"\.{re.escape(attribute)}\b|^\s*{re.escape(attribute)}\s*[:=]", re.MULTILINE)
        return sum(word.search(text) is not None for text in self._texts())

    def _inside(self, module: str, names: list[str], hops: int) -> Found | None:
        file = self._file(module)
        if file is None or hops == 0:
            return None
        tree, lines = _parsed(file)
        first, *rest = names
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == first:
                return self._member(module, node, rest, lines, hops)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for name in node.names:
                    if (name.asname or name.name) == first:
                        return self._inside(node.module, [name.name, *rest], hops - 1)
        return None

    def _member(self, module: str, node: ast.AST, names: list[str], lines: list[str], hops: int) -> Found | None:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not names:
            return Found(source_of(node, lines), f"{module}.{node.name}")
        for inner in node.body:
            if getattr(inner, "name", None) == names[0]:
                return self._member(module, inner, names[1:], lines, hops)
        for base in getattr(node, "bases", []):
            if isinstance(base, ast.Name) and (found := self._inside(module, [base.id, *names], hops - 1)) is not None:
                return found
        return None

    def _file(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        candidates = path.with_suffix(".py"), path / "__init__.py"
        return next((file for file in candidates if file.is_file()), None)

    @cache  # noqa: B019  (two releases live as long as the program)
    def _texts(self) -> list[str]:
        return [file.read_text(errors="replace") for file in (self._root / "sglang" / "srt").rglob("*.py")]


@cache
def _parsed(file: Path) -> tuple[ast.Module, list[str]]:
    text = file.read_text()
    return ast.parse(text), text.splitlines(keepends=True)


def change(before: Found | None, after: Found | None) -> str:
    """Says how a function or class differs."""
    if before is None:
        return "not found in the release that is installed here"
    if after is None:
        return "**gone**"
    moved = "" if before.place == after.place else f", now in `{after.place}`"
    if before.source == after.source:
        return f"same{moved}"
    lines = list(difflib.unified_diff(before.source.splitlines(), after.source.splitlines(), n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    heads = [found.source.partition(":\n")[0] for found in (before, after)]
    signature = "" if heads[0] == heads[1] else ", **signature**"
    return f"+{added} -{removed} of {len(before.source.splitlines())} lines{signature}{moved}"


def rows(here: Release, there: Release) -> Iterator[tuple[str, str, str, str]]:
    """Yields (kind, target, why this package touches it, what changed)."""

    def row(kind: str, target: str, why: str) -> tuple[str, str, str, str]:
        return kind, target, why, change(here.find(target), there.find(target))

    for feature in FEATURES:
        for hook in feature.hooks:
            yield row("hook", hook.target, hook.reason)
        for override in feature.overrides:
            for target in override.targets:
                yield row("override", target, override.reason)
        for patch in feature.patches:
            for attribute in patch.attributes:
                counts = here.count(attribute), there.count(attribute)
                found = "**gone**" if counts[0] and not counts[1] else f"in {counts[0]} files, then {counts[1]}"
                yield "attribute", f"{patch.owner}.{attribute}", patch.reason, found
        for relied in feature.relied:
            for target in relied.targets:
                yield row("relied on", target, relied.reason)
    for route in ROUTES:
        yield row("route", route.stock_endpoint, route.path)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0], "sglang").is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    here, there = Release(Path(spec.origin).parents[1]), Release(Path(argv[0]))
    print("| what | target | why | in the other release |\n| --- | --- | --- | --- |")
    for kind, target, why, found in rows(here, there):
        print(f"| {kind} | `{target.removeprefix('sglang.srt.')}` | {why} | {found} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
