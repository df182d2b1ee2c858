"""Who imports whom: each folder of the package only folders before it, and no modules in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sgl_prefill"
# A folder imports folders of its own line and of lines above. `dashboard` and `observability` hold files without code.
ROOMS = (
    ("core", "config", "errors", "answer", "dashboard", "observability"),
    ("kv", "hybrid"),
    ("cpu", "gpu"),
    ("startup",),
    ("port",),
    ("http",),
    ("entry",),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
TOOLS = len(ROOMS)  # batch, cluster, ray, planner, examples and programs


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(body: list[ast.stmt], *, everywhere: bool) -> Iterator[str]:
    """Modules of this package that a module imports. everywhere: in functions and for type checking too."""
    nodes = [node for one in body for node in ast.walk(one)] if everywhere else body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sgl_prefill"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else node.module


def imports_of(module: str, *, everywhere: bool) -> set[str]:
    return set(imported(ast.parse(modules()[module].read_text()).body, everywhere=everywhere))


def level_of(module: str) -> int:
    parts = module.split(".")
    return LEVELS.get(parts[1], TOOLS) if len(parts) > 1 else TOOLS


def test_no_folder_imports_one_behind_it() -> None:
    back = [
        f"{module} imports {other}"
        for module in modules()
        for other in imports_of(module, everywhere=True)
        if level_of(other) > level_of(module)
    ]
    assert not back
    assert len(modules()) > 100


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports_of(module, everywhere=False) for module in modules()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_file_name_says_which_file() -> None:
    """No two modules have one name, so that a traceback or an open tab is not mistaken for another."""
    names = [path.stem for path in modules().values() if path.stem not in ("__init__", "__main__")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice
