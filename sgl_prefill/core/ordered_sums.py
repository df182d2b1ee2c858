"""A sorted collection that also knows what all items before one of them add up to: the backlog ahead of a job."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)

MOST_IN_BLOCK = 128


class _Entry(NamedTuple):
    key: Any
    number: int  # unique, so that items are never compared; ties stay in the order in which items first came
    item: Any
    weights: tuple[float, ...]


class OrderedSums(Generic[Item]):
    """Items in ascending order of their keys, each with some weights.

    Sorted blocks of at most MOST_IN_BLOCK items, each with the sums of its weights: every method costs some microseconds at
    10,000 items, and grows with the number of blocks.

    Args:
        n_weights: of each item.
    """

    def __init__(self, n_weights: int) -> None:
        self._zeros = (0.0,) * n_weights
        self._entries: dict[Item, _Entry] = {}
        self._blocks: list[list[_Entry]] = [[]]
        self._sums: list[tuple[float, ...]] = [self._zeros]
        self._sums_before: list[tuple[float, ...]] | None = (
            None  # of each block, what all before it add up to; None: not known
        )
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item, key: Any, weights: tuple[float, ...]) -> None:
        """Add an item, or change what is known of it. Keys must compare with each other."""
        old = self._entries.get(item)
        if old is not None:
            if old.key == key and old.weights == weights:
                return
            self.discard(item)
        entry = _Entry(key, next(self._numbers) if old is None else old.number, item, weights)
        self._entries[item] = entry
        self._sums_before = None
        index = self._block_of(entry)
        block = self._blocks[index]
        bisect.insort(block, entry)
        if len(block) > MOST_IN_BLOCK:
            half = len(block) // 2
            self._blocks[index : index + 1] = [block[:half], block[half:]]
            self._sums[index : index + 1] = [self._sum(block[:half]), self._sum(block[half:])]
        else:
            self._sums[index] = _added(self._sums[index], weights)

    def discard(self, item: Item) -> None:
        """Remove an item, if it is there."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return
        self._sums_before = None
        index = self._block_of(entry)
        block = self._blocks[index]
        del block[bisect.bisect_left(block, entry)]
        if not block and len(self._blocks) > 1:
            del self._blocks[index], self._sums[index]
        else:
            self._sums[index] = tuple(map(operator.sub, self._sums[index], entry.weights)) if block else self._zeros

    def first(self) -> Item | None:
        """Returns the item with the smallest key."""
        return self._blocks[0][0].item if self._entries else None

    def __iter__(self) -> Iterator[Item]:
        """Yields the items from the smallest key on. Nothing may change meanwhile."""
        return (entry.item for block in self._blocks for entry in block)

    def weights_of(self, item: Item) -> tuple[float, ...]:
        return self._entries[item].weights

    def before(self, item: Item) -> tuple[int, tuple[float, ...]]:
        """Returns (how many have smaller keys, the sums of their weights)."""
        entry = self._entries[item]
        index = self._block_of(entry)
        ahead = self._blocks[index][: bisect.bisect_left(self._blocks[index], entry)]
        if self._sums_before is None:  # asked of several items between two changes
            of_blocks = ((len(block), *sums) for block, sums in zip(self._blocks, self._sums, strict=True))
            self._sums_before = list(itertools.accumulate(of_blocks, _added, initial=(0, *self._zeros)))
        n_items, *sums = _added(self._sums_before[index], (len(ahead), *self._sum(ahead)))
        return int(n_items), tuple(sums)

    def after(self, item: Item) -> Iterator[Item]:
        """Yields those with larger keys, in order. Nothing may change meanwhile."""
        entry = self._entries[item]
        index = self._block_of(entry)
        first = bisect.bisect_right(self._blocks[index], entry)
        rest = itertools.chain(self._blocks[index][first:], *self._blocks[index + 1 :])
        return (entry.item for entry in rest)

    def _block_of(self, entry: _Entry) -> int:
        """Finds the block in which an entry is, or belongs."""
        if not self._blocks[0]:
            return 0
        return max(bisect.bisect_right(self._blocks, entry, key=_first_entry) - 1, 0)

    def _sum(self, block: list[_Entry]) -> tuple[float, ...]:
        return tuple(map(sum, zip(*(entry.weights for entry in block), strict=True))) if block else self._zeros


def _added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(operator.add, one, other))


def _first_entry(block: list[_Entry]) -> _Entry:
    return block[0]
