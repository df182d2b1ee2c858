"""A sorted collection that also knows what all items before one of them add up to: the backlog ahead of a job."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)

MOST_IN_BLOCK = 128


class _Entry(NamedTuple):
    key: Any
    number: int  # unique, so that items are never compared; ties stay in the order in which items first came
    item: Any
    weights: tuple[float, ...]


class _Block:
    """A run of entries in order. Their weights lie beside them, kind by kind: they are added up far more often than looked at."""

    __slots__ = ("columns", "entries", "sums")

    def __init__(self, entries: list[_Entry], n_weights: int) -> None:
        self.entries = entries
        self.columns = [array("d", [entry.weights[kind] for entry in entries]) for kind in range(n_weights)]
        self.sums: tuple[float, ...] | None = None  # (number of entries, sum of each kind); None: not known

    def insert(self, entry: _Entry) -> None:
        at = bisect.bisect_left(self.entries, entry)
        self.entries.insert(at, entry)
        for column, weight in zip(self.columns, entry.weights, strict=True):
            column.insert(at, weight)
        self.sums = None

    def delete(self, entry: _Entry) -> None:
        at = bisect.bisect_left(self.entries, entry)
        del self.entries[at]
        for column in self.columns:
            del column[at]
        self.sums = None

    def known_sums(self) -> tuple[float, ...]:
        if self.sums is None:
            self.sums = (len(self.entries), *map(sum, self.columns))
        return self.sums


class OrderedSums(Generic[Item]):
    """Items in ascending order of their keys, each with some weights.

    Sorted blocks of at most MOST_IN_BLOCK items, added up on demand: every method costs some microseconds at 10,000
    items, and grows with the number of blocks.

    Args:
        n_weights: of each item.
    """

    def __init__(self, n_weights: int) -> None:
        self._n_weights = n_weights
        self._entries: dict[Item, _Entry] = {}
        self._blocks: list[_Block] = [_Block([], n_weights)]
        # For the number and each kind of weight: what all before a block add up to, block by block. None: not known.
        self._sums_before: list[list[float]] | None = None
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
        block.insert(entry)
        if len(block.entries) > MOST_IN_BLOCK:
            half = len(block.entries) // 2
            halves = block.entries[:half], block.entries[half:]
            self._blocks[index : index + 1] = [_Block(entries, self._n_weights) for entries in halves]

    def discard(self, item: Item) -> None:
        """Remove an item, if it is there."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return
        self._sums_before = None
        index = self._block_of(entry)
        self._blocks[index].delete(entry)
        if not self._blocks[index].entries and len(self._blocks) > 1:
            del self._blocks[index]

    def first(self) -> Item | None:
        """Returns the item with the smallest key."""
        return self._blocks[0].entries[0].item if self._entries else None

    def __iter__(self) -> Iterator[Item]:
        """Yields the items from the smallest key on. Nothing may change meanwhile."""
        return (entry.item for block in self._blocks for entry in block.entries)

    def weights_of(self, item: Item) -> tuple[float, ...]:
        return self._entries[item].weights

    def before(self, item: Item) -> tuple[int, tuple[float, ...]]:
        """Returns (how many have smaller keys, the sums of their weights)."""
        entry = self._entries[item]
        index = self._block_of(entry)
        block = self._blocks[index]
        n_before, *sums_before = self._before_block(index)
        at = bisect.bisect_left(block.entries, entry)
        in_block = (sum(column[:at]) for column in block.columns)
        return int(n_before) + at, tuple(before + here for before, here in zip(sums_before, in_block, strict=True))

    def sums(self) -> tuple[float, ...]:
        """Returns the sums of the weights of all."""
        return self._before_block(len(self._blocks))[1:]

    def _before_block(self, index: int) -> tuple[float, ...]:
        if self._sums_before is None:  # asked of several items between two changes
            by_kind = zip(*(each.known_sums() for each in self._blocks), strict=True)
            self._sums_before = [list(itertools.accumulate(sums, initial=0)) for sums in by_kind]
        return tuple(sums[index] for sums in self._sums_before)

    def after(self, item: Item) -> Iterator[Item]:
        """Yields those with larger keys, in order. Nothing may change meanwhile."""
        entry = self._entries[item]
        index = self._block_of(entry)
        first = bisect.bisect_right(self._blocks[index].entries, entry)
        later = itertools.chain.from_iterable(
            block.entries for block in itertools.islice(self._blocks, index + 1, None)
        )
        return (entry.item for entry in itertools.chain(self._blocks[index].entries[first:], later))

    def _block_of(self, entry: _Entry) -> int:
        """Finds the block in which an entry is, or belongs."""
        if not self._blocks[0].entries:
            return 0
        return max(bisect.bisect_right(self._blocks, entry, key=_first_entry) - 1, 0)


def _first_entry(block: _Block) -> _Entry:
    return block.entries[0]
