"""The prefixes that rows of a job share, as a tree (BatchLLM, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = -1


class PrefixNode(NamedTuple):
    """A prefix that several rows share, and no longer one is shared by all of them."""

    n_tokens: int  # from the beginning of the rows on
    first: int  # the rows `first` to `end - 1` in their order
    end: int
    parent: int  # the number of the node that holds the next shorter prefix of these rows, or ROOT

    @property
    def n_rows(self) -> int:
        return self.end - self.first


def build(shared_tokens: Sequence[int]) -> list[PrefixNode]:
    """Builds the compact prefix tree of sorted rows: O(rows), parents before their children, siblings in order.

    Args:
        shared_tokens: what each row shares with the one before it, as far as it can be reused.
    """
    spans: list[tuple[int, int, int]] = []  # (first row, tokens, end): sorts parents before their children
    is_open: list[tuple[int, int]] = []  # (tokens, first row), each longer than the one below it
    for row, n_shared in enumerate([*shared_tokens, 0]):
        first = row - 1
        while is_open and is_open[-1][0] > n_shared:
            n_tokens, first = is_open.pop()
            spans.append((first, n_tokens, row))
        if n_shared > (is_open[-1][0] if is_open else 0):
            is_open.append((n_shared, first))
    nodes: list[PrefixNode] = []
    path: list[int] = []
    for first, n_tokens, end in sorted(spans):
        while path and nodes[path[-1]].end <= first:
            path.pop()
        nodes.append(PrefixNode(n_tokens, first, end, path[-1] if path else ROOT))
        path.append(len(nodes) - 1)
    return nodes


class Placed(NamedTuple):
    """A row of a depth-first order."""

    row: int  # its place in the sorted order
    n_shared_tokens: int  # with the rows before it


def with_siblings_sorted(
    nodes: Sequence[PrefixNode], n_rows: int, key: Callable[[int, int, int], Any]
) -> Iterator[Placed]:
    """Yields all rows depth first, siblings in another order: what the tree shares is shared in any.

    Args:
        key: of a subtree or a row alone, by its first row, its end and the tokens of the prefix above it.
    """
    children: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(number)

    def below(parent: int, first: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Yields (first row, end, node) of each sibling; a row alone has no node."""
        for child in children.get(parent, ()):
            yield from ((row, row + 1, None) for row in range(first, nodes[child].first))
            first = nodes[child].end
            yield nodes[child].first, first, child
        yield from ((row, row + 1, None) for row in range(first, end))

    def in_order(parent: int, first: int, end: int, n_inherited: int) -> list[tuple[int, int, int | None, int]]:
        n_tokens = nodes[parent].n_tokens if parent != ROOT else 0
        siblings = sorted(below(parent, first, end), key=lambda one: key(one[0], one[1], n_tokens))
        return [(*one, n_tokens if place else n_inherited) for place, one in enumerate(siblings)]

    waiting = in_order(ROOT, 0, n_rows, 0)[::-1]
    while waiting:
        first, end, subtree, n_shared = waiting.pop()
        if subtree is None:
            yield Placed(first, n_shared)
        else:
            waiting += in_order(subtree, first, end, n_shared)[::-1]
