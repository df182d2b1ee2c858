"""Masks the keys of a command line in logs and answers."""

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
    """Masks keys among SGLang's arguments, and in the command that they come from."""
    keys = [str(found[name]) for name in FIELDS if found.get(name)]
    shown = {name: MASK if name in FIELDS and value else value for name, value in found.items()}
    if command := found.get("launch_command"):
        for key in sorted(keys, key=len, reverse=True):
            command = command.replace(key, MASK)
        shown["launch_command"] = command
    return shown
