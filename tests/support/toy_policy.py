"""The policy that STRUCTURE.md shows, registered from its text."""

from __future__ import annotations

import re
from pathlib import Path

import sgl_prefill

NAME = "newest-first"


def register() -> str:
    """Run the page's code; the policy's name."""
    page = (Path(sgl_prefill.__file__).parent / "STRUCTURE.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    return NAME
