"""What a container lets this process take of the machine's memory: the limits of its control group (cgroup), versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    """Where one version of the kernel's interface keeps what."""

    root: str
    limit: str
    usage: str
    files: tuple[str, ...]  # of memory.stat: pages of files, which the kernel takes back


V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def free_bytes(system: Path = Path("/")) -> float:
    """Returns how much more memory this process may take before its group, or one around it, is at its limit; infinity where
    there is none.

    Args:
        system: where `proc` and `sys` are.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    left = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            version = V2 if controllers == "" else V1
            left += [_left(folder, version) for folder in _groups(system / version.root, path)]
    return min(left)


def _groups(root: Path, path: str) -> Iterator[Path]:
    """Yields a group and those around it. Within a container its own may be the root, whatever it is called outside."""
    inner = root / path.lstrip("/")
    yield inner
    while inner != root:
        inner = inner.parent
        yield inner


def _left(folder: Path, version: _Version) -> float:
    try:
        limit, usage = (folder / name for name in (version.limit, version.usage))
        limit_bytes = int(limit.read_text())  # "max": none, as is a number beyond any machine's memory
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        n_files = sum(int(stat.get(name, 0)) for name in version.files)
        return max(limit_bytes - max(int(usage.read_text()) - n_files, 0), 0)
    except (OSError, ValueError):
        return math.inf
