"""What must outlive the death of an actor: who asks which server, and which row an engine died of.

One small actor of its own holds it while the dataset is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

DIED = "the engine ended while it answered this row"


class Begun(NamedTuple):
    """What is known of a unit that is begun."""

    n_before: int  # so often it was begun before, by actors that died
    killers: dict[int, str]  # rows of which an engine died alone, and what it said


class Register:
    """Its methods are called by the actors of one job."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls = urls
        self._url_of: dict[str, str] = {}
        self._begun: dict[str, int] = defaultdict(int)
        self._alone: dict[str, int] = {}  # unit -> the row that runs alone
        self._killers: dict[str, dict[int, str]] = defaultdict(dict)

    def url_of(self, actor: str) -> str:
        """Returns the server that an actor asks: the same as before it died, and for a new one that which fewest ask."""
        if actor not in self._url_of:
            taken = list(self._url_of.values())
            self._url_of[actor] = min(self._urls, key=taken.count)
        return self._url_of[actor]

    def begin(self, unit: str) -> Begun:
        """Counts a try. A row that ran alone when the last one ended is one that kills."""
        if (row := self._alone.pop(unit, None)) is not None:
            self._killers[unit].setdefault(row, DIED)
        n_before = self._begun[unit]
        self._begun[unit] += 1
        return Begun(n_before, self._killers[unit])

    def alone(self, unit: str, row: int) -> None:
        """Notes that nothing but this row is with the engine."""
        self._alone[unit] = row

    def failed(self, unit: str, row: int, message: str) -> None:
        """Notes what an engine said before it ended with this row alone."""
        self._killers[unit][row] = message

    def end(self, unit: str) -> None:
        """Forgets a unit that was answered."""
        self._begun.pop(unit, None)
        self._alone.pop(unit, None)
        self._killers.pop(unit, None)
