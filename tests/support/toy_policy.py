"""The policy that STRUCTURE.md shows, put into the table of policies from its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sgl_prefill
from sgl_prefill.core.policies import POLICIES

NAME = "newest-first"


def register() -> str:
    """Runs the page's code, and returns the policy's name."""
    page = (Path(sgl_prefill.__file__).parent / "STRUCTURE.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    defined = dict[str, Any]()
    exec(code, defined)
    (kind,) = re.findall(rf'`"{NAME}": (\w+)`', page)
    POLICIES[NAME] = defined[kind]
    return NAME
