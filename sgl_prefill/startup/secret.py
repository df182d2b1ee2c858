"""Masks the command line's keys in logs and answers."""

from __future__ import annotations

from typing import Any

FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")  # of SGLang's ServerArgs
MASK = "********"


class Secret(str):
    """A string whose repr is a mask."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)


def masked(found: dict[str, Any]) -> dict[str, Any]:
    return {name: MASK if name in FIELDS and value else value for name, value in found.items()}
