"""The conformance test of /v1/systemone: every requirement that applies without keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from work import URL

command = Path(sys.executable).with_name("jevcompat")
done = subprocess.run([command, "test", URL], capture_output=True, text=True, timeout=250, check=False)
assert done.returncode == 0, done.stdout + done.stderr
assert "FAIL" not in done.stdout, done.stdout
