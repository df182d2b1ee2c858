"""The limits of a container, from files as the kernel shows them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sgl_prefill import container_memory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_the_group_with_least_left_counts_and_pages_of_files_are_free(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/pod/job\n")
    root = system / "sys/fs/cgroup"
    stat = "anon 50\nfile 30\ninactive_file 20\nactive_file 5\n"
    write(root / "pod/job", memory__max="max\n", memory__current="70\n", memory__stat=stat)
    assert container_memory.free_bytes(system) == math.inf
    write(root / "pod", memory__max="100\n", memory__current="90\n", memory__stat=stat)
    assert container_memory.free_bytes(system) == 100 - (90 - 25)
    write(root / "pod/job", memory__max="80\n")
    assert container_memory.free_bytes(system) == 80 - (70 - 25)


def test_the_older_interface_and_a_container_whose_group_is_the_root(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/docker/7f\n0::/\n")
    write(
        system / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="400",
        memory__stat="cache 300\ntotal_inactive_file 100\ntotal_active_file 200\n",
    )
    assert container_memory.free_bytes(system) == 1000 - 100


def test_a_group_over_its_limit_has_nothing_left_and_no_groups_are_no_limit(system: Path) -> None:
    assert container_memory.free_bytes(system) == math.inf
    (system / "proc/self/cgroup").write_text("0::/\n")
    write(system / "sys/fs/cgroup", memory__max="10", memory__current="20", memory__stat="")
    assert container_memory.free_bytes(system) == 0
