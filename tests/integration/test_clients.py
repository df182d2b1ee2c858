"""Clients of other projects, unchanged, each in a process of the environment that their pins need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import Server
from tests.selection import ROOT

PYTHON = ROOT / ".venv-clients/bin/python"  # made by scripts/test.sh


@pytest.mark.skipif(not PYTHON.exists(), reason="scripts/test.sh installs tests/clients/requirements.txt")
@pytest.mark.parametrize("client", sorted((ROOT / "tests/clients").glob("with_*.py")), ids=lambda client: client.stem)
def test_a_client_works_unchanged(server: Server, client: Path) -> None:
    done = subprocess.run([PYTHON, client, server.url], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
