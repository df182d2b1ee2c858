"""The largest and most used prefixes of the cache, for the dashboard. The tree is walked for 3 ms per snapshot, so that no step
is delayed for long.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

N_SHOWN = 64
N_BY_HITS = 8
N_NAMED_TOKENS = 48
PART_S = 0.003
PIECE_NODES = 64


class Tree(Protocol):
    def root(self) -> Any: ...
    def children(self, node: Any) -> Sequence[Any]: ...
    def n_tokens(self, node: Any) -> int: ...
    def n_hits(self, node: Any) -> int: ...
    def first_tokens(self, node: Any, n_tokens: int) -> array[int]: ...


class View(NamedTuple):
    """Result of one walk through the tree."""

    at_s: float
    n_prefixes: int
    n_tokens: int
    largest: list[dict[str, Any]]  # as the page reads them, parents before their children
    most_hit: list[dict[str, Any]]


class Survey:
    """Walks a cache again and again. key: of the hashes that name prefixes: without it, readers could test guessed texts."""

    def __init__(self, tree: Tree, key: bytes) -> None:
        self._tree, self._key = tree, key
        self.view: View | None = None
        self._parts = self._walks()

    def go_on(self, most_s: float = PART_S) -> None:
        """Continues the walk for `most_s` seconds, or until there is a new view."""
        until_s = time.perf_counter() + most_s
        while not next(self._parts) and time.perf_counter() < until_s:
            pass

    def _walks(self) -> Iterator[bool]:
        """Yields after each short piece of work: whether it has finished a view."""
        while True:
            yield from self._walk()
            yield True

    def _walk(self) -> Iterator[bool]:
        tree, walked = self._tree, _Walked([self._tree.root()], [0], [0], [0], [])
        nodes = walked.nodes
        for place, node in enumerate(nodes):  # breadth first: the loop appends to it
            walked.first_child.append(len(nodes))
            children = tree.children(node)
            for start in range(0, len(children), PIECE_NODES):
                some = children[start : start + PIECE_NODES]
                nodes += some
                walked.parents.extend([place] * len(some))
                walked.n_tokens.extend(map(tree.n_tokens, some))
                walked.n_hits.extend(map(tree.n_hits, some))
                yield False
            if place % PIECE_NODES == 0:
                yield False
        totals = walked.n_tokens.copy()
        for place in range(len(totals) - 1, 0, -1):
            totals[walked.parents[place]] += totals[place]
            if place % (16 * PIECE_NODES) == 0:
                yield False
        sums = np.array(totals)
        largest: list[int] = []
        heap = walked.best_children(0, sums)
        heapq.heapify(heap)
        while heap and len(largest) < N_SHOWN:
            _, place = heapq.heappop(heap)
            largest.append(place)
            for child in walked.best_children(place, sums):
                heapq.heappush(heap, child)
            yield False
        most_hit = [place for place in _largest(np.array(walked.n_hits), N_BY_HITS) if walked.n_hits[place] > 0]
        yield False
        places = {place: index for index, place in enumerate(largest)}
        self.view = View(
            time.perf_counter(),
            len(nodes) - 1,
            totals[0],
            [self._shown(walked, place, totals, places) for place in largest],
            [self._shown(walked, place, totals, {}) for place in most_hit],
        )

    def _shown(self, walked: _Walked, place: int, totals: Sequence[int], places: Mapping[int, int]) -> dict[str, Any]:
        first = self._tree.first_tokens(walked.nodes[place], N_NAMED_TOKENS)
        return {
            "parent": places.get(walked.parents[place]),  # index in the list; None: the node begins a prompt
            "tokens": walked.n_tokens[place],
            "below": totals[place] - walked.n_tokens[place],  # of all descendants
            "hits": walked.n_hits[place],
            "name": blake2b(first.tobytes(), digest_size=4, key=self._key).hexdigest(),
        }


class _Walked(NamedTuple):
    """The nodes of a tree in breadth-first order, a list per property."""

    nodes: list[Any]
    parents: list[int]  # index of each node's parent
    n_tokens: list[int]
    n_hits: list[int]
    first_child: list[int]  # index of each node's first child; the next node's children follow its own

    def best_children(self, place: int, totals: Any) -> list[tuple[int, int]]:
        """Returns (negative tokens, index) of the largest children of a node."""
        first = self.first_child[place]
        end = self.first_child[place + 1] if place + 1 < len(self.nodes) else len(self.nodes)
        return [(-int(totals[first + one]), first + one) for one in _largest(totals[first:end], N_SHOWN)]


def _largest(values: Any, n: int) -> list[int]:
    """Returns the indices of the n largest values in descending order."""
    places = np.argpartition(-values, n)[:n] if len(values) > n else np.arange(len(values))
    found: list[int] = places[np.argsort(-values[places], kind="stable")].tolist()
    return found
