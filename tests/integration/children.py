"""Processes of their own for engines and schedulers, which leave sockets, handlers and globals behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run_child(module: str, *arguments: str) -> dict[str, Any]:
    """What `python -m tests.integration.MODULE ARGUMENTS` prints as its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.{module}", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
