"""Checks version and source of the installed SGLang's functions that this package hooks or relies on.

`python scripts/fingerprints.py` lists differences, and records new sources.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sgl_prefill.errors import SeamError

SUPPORTED_SGLANG_VERSION = "0.5.23"
# Importing this module needs a CUDA device: its source is read from the file.
NEEDS_A_DEVICE = ("sglang.srt.layers.attention.flashattention_backend.",)
FINGERPRINT_FILE = Path(__file__).with_name("fingerprints.json")


def installed_sglang_version() -> str:
    """Returns "none" where SGLang is not installed. Does not import it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def fingerprint(target: str) -> str:
    """Returns the SHA-256 of the source of a function or class, "missing" where it does not exist. A hooked function has SGLang's
    source, since `inspect` follows `__wrapped__`.
    """
    try:
        if target.startswith(NEEDS_A_DEVICE):
            source = source_from_file(target, target.rsplit(".", 2)[0])
        else:
            found: Any = pkgutil.resolve_name(target)
            source = inspect.getsource(getattr(found, "fget", found))
    except (ImportError, AttributeError):
        return "missing"
    return hashlib.sha256(source.encode()).hexdigest()


def source_from_file(target: str, module: str) -> str:
    """Returns the source of a function or class without importing its module. Raises AttributeError where it does not exist."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise AttributeError(f"there is no module {module}")
    lines = Path(spec.origin).read_text().splitlines(keepends=True)
    found: ast.AST = ast.parse("".join(lines))
    for name in target.removeprefix(f"{module}.").split("."):
        inside = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == name]
        if not inside:
            raise AttributeError(f"{module} has no {name} of {target}")
        found = inside[-1]
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return source_of(found, lines)


def source_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: Sequence[str]) -> str:
    """Returns the source of a function or class with its decorators. lines: of its file."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(lines[first - 1 : node.end_lineno])


def differing(targets: Iterable[str]) -> list[str]:
    """Returns a message for each target whose source is not the recorded one."""
    known: dict[str, str] = json.loads(FINGERPRINT_FILE.read_text())
    lines = []
    for target in targets:
        found = fingerprint(target)
        if found == "missing":
            lines.append(f"{target} does not exist in the installed SGLang")
        elif known.get(target) != found:
            lines.append(f"{target} differs from the source that this package was written for")
    return lines


def version_problem() -> str | None:
    """Returns what is wrong with the installed version, or None. Does not import SGLang."""
    version = installed_sglang_version()
    if version == SUPPORTED_SGLANG_VERSION:
        return None
    return (
        f"SGLang {version} is installed, and this package hooks into {SUPPORTED_SGLANG_VERSION} only:"
        f" run `pip install sglang=={SUPPORTED_SGLANG_VERSION}`"
    )


def check_source() -> None:
    """Raises SeamError, naming every target, unless version and sources are as recorded."""
    if problem := version_problem():
        raise SeamError(problem)
    from sgl_prefill.entry.hooks import fingerprinted_targets

    if lines := differing(fingerprinted_targets()):
        raise SeamError(
            "the installed SGLang was changed where this package hooks into it:\n  "
            + "\n  ".join(lines)
            + f"\nreinstall it: `pip install --force-reinstall --no-deps sglang=={SUPPORTED_SGLANG_VERSION}`"
        )
