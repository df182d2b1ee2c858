"""Stores measurements of a start for the next one, under the user's cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_prefill.core.ranks import Ranks

logger = logging.getLogger(__name__)

FORMAT = 8
LOCK = "SGL_PREFILL_MEASURING_LOCK"  # environment variable of engines that start together: a file


def cache_root() -> Path:
    """Folder of this package's files: in XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl_prefill"


@contextmanager
def measuring_in_turn(ranks: Ranks) -> Iterator[None]:
    """Engines of a cluster measure one after the other: the later ones find what the first has stored."""
    path = os.environ.get(LOCK)
    if path is None or ranks.index > 0:  # the other ranks wait for the first
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load_for_all(
    ranks: Ranks,
    kind: str,
    depends_on: Mapping[str, Any],
    fields: Mapping[str, type],
    is_enough: Callable[[dict[str, Any]], bool] = lambda found: True,
) -> dict[str, Any] | None:
    """Like `load`, but None on all ranks where one of them finds nothing or not enough: ranks measure together."""
    found = load(kind, depends_on, fields)
    return found if all(ranks.of_all(found is not None and is_enough(found))) else None


def load(kind: str, depends_on: Mapping[str, Any], fields: Mapping[str, type]) -> dict[str, Any] | None:
    """Returns the value that `store` wrote for equal `depends_on`; None where there is none or the file is invalid.

    fields: the value's keys and types; each must be a finite number >= 0.
    """
    path = _path(kind, depends_on)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the stored %s in %s cannot be read (%s): measuring again", kind, path, error)
        return None
    if problem := _problem_of(found, fields):
        logger.warning("the stored %s in %s is not as it should be (%s): measuring again", kind, path, problem)
        return None
    value: dict[str, Any] = found
    return value


def store(kind: str, depends_on: Mapping[str, Any], value: dict[str, Any]) -> None:
    """Writes atomically: two engines may start together. If the directory cannot be written, logs it; the next start measures."""
    path = _path(kind, depends_on)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            try:
                part.write(json.dumps(value))
                part.flush()
                os.replace(part.name, path)
            except OSError:
                os.unlink(part.name)
                raise
    except OSError as error:
        logger.warning("the %s cannot be kept in %s (%s)", kind, path, error)


def _problem_of(found: Any, fields: Mapping[str, type]) -> str | None:
    if not isinstance(found, dict) or found.keys() != fields.keys():
        return f"it must hold {', '.join(fields)}"
    for name, kind in fields.items():
        is_number = isinstance(found[name], int | float if kind is float else int) and not isinstance(found[name], bool)
        if not is_number or not 0 <= found[name] < math.inf:
            return f"{name} is {found[name]!r}"
    return None


def _path(kind: str, depends_on: Mapping[str, Any]) -> Path:
    key = {"format": FORMAT, **depends_on}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_root() / "profiles" / f"{kind.replace(' ', '-')}-{digest}.json"
