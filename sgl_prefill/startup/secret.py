"""Keys of the command line, which nobody shall read in a log or an answer."""

from __future__ import annotations

from typing import Any

FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")  # of SGLang's ServerArgs
MASK = "********"


class Secret(str):
    """Compares as the text that it is, and is shown as none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)


def masked(found: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as anyone may see them."""
    return {name: MASK if name in FIELDS and value else value for name, value in found.items()}
