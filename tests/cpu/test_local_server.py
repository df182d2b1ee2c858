"""Starting a server as a process of its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sgl_prefill.entry import local_server


def test_a_server_that_is_not_up_yet_ends_with_its_caller(tmp_path: Path) -> None:
    """As where `timeout` ends a benchmark while an engine starts: it would hold the device's memory for ever."""
    (tmp_path / "never_healthy.py").write_text("import threading\nthreading.Event().wait()\n")
    seen: list[psutil.Process] = []

    def interrupted(_: float) -> None:
        seen.extend(psutil.Process().children())
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        local_server.start(
            "never_healthy", [], tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)}, on_wait=interrupted
        )
    assert seen
    assert not any(process.is_running() for process in seen)


def test_a_free_port_is_none_that_a_connection_could_get() -> None:
    """A server that was told a port from the system's own range found it taken by a connection of another process."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {local_server.free_port() for _ in range(50)}
    assert 1024 < min(ports) <= max(ports) < first
    assert len(ports) > 40
