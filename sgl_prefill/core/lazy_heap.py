"""A priority queue whose entries can be changed and removed, on the standard library's heap."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Items in ascending order of their keys; ties in the order in which items first came.

    A changed or removed item leaves its old entry in the heap, to be thrown away once it comes up; the heap is rebuilt when
    such entries outnumber the others, so that every method costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        self._heap: list[tuple[Any, int, Item]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item, key: Any) -> None:
        """Add an item, or change its key. Keys must compare with each other."""
        old = self._entries.get(item)
        if old is not None and old[0] == key:
            return
        # The number is unique among valid entries, so that items are never compared.
        entry = (key, next(self._numbers) if old is None else old[1], item)
        self._entries[item] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove an item, if it is there."""
        self._entries.pop(item, None)

    def first(self) -> Item | None:
        """Returns the item with the smallest key, which stays."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def key_of(self, item: Item) -> Any:
        return self._entries[item][0]

    def in_order(self) -> Iterator[Item]:
        """Yields items from the smallest key on, without removing them; costs O(log n) for each that is taken."""
        taken = []
        try:
            while (item := self.first()) is not None:
                taken.append(heapq.heappop(self._heap))
                yield item
        finally:
            for entry in taken:
                if self._is_valid(entry):
                    heapq.heappush(self._heap, entry)

    def _is_valid(self, entry: tuple[Any, int, Item]) -> bool:
        return self._entries.get(entry[2]) is entry
