"""What the ranks of one engine (tensor parallelism) agree on before any goes on. Each calls the same, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Value = TypeVar("Value")


class Ranks(Protocol):
    """The processes that compute one model together, as one of them sees them."""

    index: int  # of this one
    count: int

    def of_first(self, value: Value) -> Value:
        """Returns the value that rank 0 has given; what the others give is not read."""
        ...

    def of_all(self, value: Value) -> list[Value]:
        """Returns what each rank has given, by its index."""
        ...


class OneRank:
    """An engine of one process agrees with itself."""

    index, count = 0, 1

    def of_first(self, value: Value) -> Value:
        return value

    def of_all(self, value: Value) -> list[Value]:
        return [value]


ALONE = OneRank()


def smallest(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """Returns the smallest of each number: each rank has measured for itself, and all must serve the same."""
    return [min(of_number) for of_number in zip(*ranks.of_all(list(numbers)), strict=True)]
