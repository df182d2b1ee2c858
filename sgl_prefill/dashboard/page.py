"""The page as one file: markup, style, script and the libraries that draw its charts, so that a browser asks for nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/d3-hierarchy.min.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "page.css")


class Page(NamedTuple):
    """What a browser gets."""

    html: bytes
    policy: str  # Content-Security-Policy: these scripts and styles run, no other, and nothing is asked of another host


@functools.cache
def page() -> Page:
    """Puts the page together."""
    scripts, styles = "\n".join(map(_text, SCRIPTS)), "\n".join(map(_text, STYLES))
    assert "</script" not in scripts, "a script would end there"
    html = _text("page.html").replace("/*STYLES*/", styles).replace("/*SCRIPTS*/", scripts)
    policy = (
        f"default-src 'none'; script-src {_hash(scripts)}; style-src {_hash(styles)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
