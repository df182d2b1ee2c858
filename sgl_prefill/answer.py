"""The reply to a request, from a server or from an engine in this process."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    status: int  # of HTTP
    body: bytes  # JSON

    @property
    def is_ok(self) -> bool:
        return self.status < 400
