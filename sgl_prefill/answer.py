"""An answer as a server gives it, whoever gives it."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """What HTTP would carry."""

    status: int
    body: bytes  # JSON

    @property
    def is_ok(self) -> bool:
        return self.status < 400
