"""SGLang's `scheduler.waiting_queue` as a list that records appended items and whether anything else was changed.

SGLang appends arrivals, removes cancelled requests, and sometimes assigns a new list. So the policy follows the changes without
comparing ten thousand requests in each step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

Item = TypeVar("Item")


class WaitingList(list[Item]):
    def __init__(self, items: Any = ()) -> None:
        super().__init__(items)
        self._appended: list[Item] = list(self)
        self._is_changed = False
        self._number_all()

    def append(self, item: Item) -> None:
        super().append(item)
        self._appended.append(item)
        self._numbers[item] = self._next_number
        self._next_number += 1

    def take_changes(self) -> list[Item] | None:
        """Returns the items appended since the last call; None after any other change: the caller must compare all items."""
        appended = None if self._is_changed else self._appended
        if self._is_changed:
            self._number_all()
        self._appended, self._is_changed = [], False
        return appended

    def take_out(self, items: Collection[Item]) -> None:
        """Removes items without recording a change. Costs O(log n) each right after `take_changes`."""
        for item in items:
            place = bisect.bisect_left(self, self._numbers[item], key=self._numbers.__getitem__)
            assert self[place] is item
            super().__delitem__(place)
            del self._numbers[item]

    def _number_all(self) -> None:
        self._numbers = {item: number for number, item in enumerate(self)}  # ascending along the list
        self._next_number = len(self)


class Counted(Collection[Any]):
    """Stands in for the waiting requests where SGLang only counts them and sums their lengths: one item has all tokens."""

    def __init__(self, n_requests: int, n_tokens: int) -> None:
        self._n_requests = n_requests
        self._all = SimpleNamespace(seqlen=n_tokens, num_matched_prefix_tokens=0)

    def __len__(self) -> int:
        return self._n_requests

    def __iter__(self) -> Iterator[Any]:
        return iter([self._all])

    def __contains__(self, request: object) -> bool:
        return request is self._all


def _noting_change(name: str) -> Callable[..., Any]:
    original = getattr(list, name)

    def method(self: WaitingList[Any], *arguments: Any, **options: Any) -> Any:
        self._is_changed = True
        return original(self, *arguments, **options)

    method.__name__ = name
    return method


for _name in (
    "extend",
    "insert",
    "pop",
    "remove",
    "clear",
    "sort",
    "reverse",
    "__setitem__",
    "__delitem__",
    "__iadd__",
):
    setattr(WaitingList, _name, _noting_change(_name))
