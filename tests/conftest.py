"""Leaves rare tests out where nothing that they cover changed, and names the files that exceed their time budget."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import selection

# Read when torch is imported. Processes run side by side: a thread that waits for others by spinning keeps them from a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the rare tests of tests/selection.py too")


def pytest_configure(config: pytest.Config) -> None:
    named = {argument.partition("[")[0] for argument in config.args}
    left_out = set() if config.option.all else selection.left_out(selection.changed_files())
    config.stash[LEFT_OUT] = {test for test in left_out if not any(_names(argument, test) for argument in named)}


LEFT_OUT = pytest.StashKey[Iterable[str]]()


def _names(argument: str, test: str) -> bool:
    """Says whether a command line's argument means this file or test, rather than a folder of it."""
    path, _, name = argument.partition("::")
    file, _, rare_name = test.partition("::")
    return Path(path).resolve() == selection.ROOT / file and (not rare_name or name.startswith(rare_name))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    file = collection_path.relative_to(selection.ROOT) if collection_path.is_relative_to(selection.ROOT) else None
    return True if str(file) in config.stash[LEFT_OUT] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = config.stash[LEFT_OUT]
    rare = [item for item in items if item.nodeid.partition("[")[0] in left_out]
    if rare:
        config.hook.pytest_deselected(items=rare)
        items[:] = [item for item in items if item not in rare]


def pytest_report_header(config: pytest.Config) -> str:
    left_out = sorted(config.stash[LEFT_OUT])
    return f"left out, as nothing they cover changed (--all runs them): {', '.join(left_out) or 'none'}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Servers that the session shares are charged to no file: the first one that asks would wait for their start."""
    began_s = time.perf_counter()
    try:
        return (yield)
    finally:
        if fixturedef.scope == "session":
            _seconds[os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]] -= time.perf_counter() - began_s


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Named, and no failure: the same files take five times as long on some machines."""
    for sentence in selection.over_budget(_seconds):
        terminalreporter.write_line(f"TOO LONG {sentence}", red=True)
