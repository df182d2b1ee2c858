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
