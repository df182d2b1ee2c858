"""Engines that start together measure one after the other."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sgl_prefill.core.ranks import ALONE
from sgl_prefill.startup import disk_cache


def is_free(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_the_first_rank_of_one_engine_holds_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second rank that asked for it would wait for its own engine."""
    path = tmp_path / "lock"
    monkeypatch.setenv(disk_cache.LOCK, str(path))
    with disk_cache.measuring_in_turn(ALONE):
        assert not is_free(path)
        with disk_cache.measuring_in_turn(cast(Any, SimpleNamespace(index=1))):
            pass
    assert is_free(path)
