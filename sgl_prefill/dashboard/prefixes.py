"""The largest prefixes of a cache, found by walking its tree a part at a time: fifty thousand nodes would hold a step up."""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

N_SHOWN = 64
N_BY_HITS = 8
N_FIRST_TOKENS = 12
PART_S = 0.003
LOOK_AT_TIME_EVERY = 64  # nodes


class Tree(Protocol):
    """What is asked of a prefix cache."""

    def root(self) -> Any: ...
    def children(self, node: Any) -> Sequence[Any]: ...
    def n_tokens(self, node: Any) -> int: ...
    def n_hits(self, node: Any) -> int: ...
    def first_tokens(self, node: Any, n_tokens: int) -> array[int]: ...


class Shown(NamedTuple):
    """One prefix that is shown."""

    parent: int | None  # its place in the list; None: it begins a prompt
    n_tokens: int  # of itself
    n_below_tokens: int  # of what goes on from it
    n_hits: int
    name: str  # a hash, which says nothing of the text
    first_tokens: list[int]


class View(NamedTuple):
    """A cache as it was while it was walked."""

    at_s: float
    n_prefixes: int
    n_tokens: int
    largest: list[Shown]  # parents before their children
    most_hit: list[Shown]


class Survey:
    """Walks a cache again and again. key: of the names of prefixes, so that nobody can try out texts."""

    def __init__(self, tree: Tree, key: bytes) -> None:
        self._tree, self._key = tree, key
        self.view: View | None = None
        self._begin()

    def _begin(self) -> None:
        self._nodes: list[Any] = [self._tree.root()]
        self._parents, self._n_tokens, self._n_hits = [0], [0], [0]
        self._first_child: list[int] = []
        self._left: deque[Any] = deque(self._nodes)

    def go_on(self, most_s: float = PART_S) -> None:
        """Walks for so long at most, and makes a new view where that was all."""
        tree, until_s = self._tree, time.perf_counter() + most_s
        while self._left:
            for _ in range(min(LOOK_AT_TIME_EVERY, len(self._left))):
                node, place = self._left.popleft(), len(self._first_child)
                self._first_child.append(len(self._nodes))
                children = tree.children(node)
                self._nodes += children
                self._left += children
                self._parents += [place] * len(children)
                self._n_tokens += map(tree.n_tokens, children)
                self._n_hits += map(tree.n_hits, children)
            if time.perf_counter() > until_s:
                break
        if not self._left:
            self.view = self._viewed()
            self._begin()

    def _viewed(self) -> View:
        totals = self._n_tokens.copy()
        for place in range(len(totals) - 1, 0, -1):
            totals[self._parents[place]] += totals[place]
        largest = self._largest(totals)
        places = {place: index for index, place in enumerate(largest)}
        hits = np.array(self._n_hits[1:])
        n_by_hits = min(N_BY_HITS, len(hits))
        top: Any = np.argpartition(-hits, n_by_hits - 1)[:n_by_hits] + 1 if n_by_hits else []
        most_hit = sorted((int(place) for place in top if self._n_hits[place] > 0), key=lambda one: -self._n_hits[one])
        return View(
            time.perf_counter(),
            len(totals) - 1,
            totals[0],
            [self._shown(place, totals, places) for place in largest],
            [self._shown(place, totals, {}) for place in most_hit],
        )

    def _largest(self, totals: Sequence[int]) -> list[int]:
        """Chooses the places that hold most, each after the one that it goes on from."""
        found: list[int] = []
        heap = self._best_children(0, totals)
        heapq.heapify(heap)
        while heap and len(found) < N_SHOWN:
            _, place = heapq.heappop(heap)
            found.append(place)
            for child in self._best_children(place, totals):
                heapq.heappush(heap, child)
        return found

    def _best_children(self, place: int, totals: Sequence[int]) -> list[tuple[int, int]]:
        end = self._first_child[place + 1] if place + 1 < len(self._first_child) else len(self._nodes)
        children = range(self._first_child[place], end)
        return heapq.nsmallest(N_SHOWN, ((-totals[child], child) for child in children))

    def _shown(self, place: int, totals: Sequence[int], places: dict[int, int]) -> Shown:
        node = self._nodes[place]
        return Shown(
            places.get(self._parents[place]),
            self._n_tokens[place],
            totals[place] - self._n_tokens[place],
            self._n_hits[place],
            self._name(node),
            self._tree.first_tokens(node, N_FIRST_TOKENS).tolist(),
        )

    def _name(self, node: Any) -> str:
        first = self._tree.first_tokens(node, 4 * N_FIRST_TOKENS)
        return blake2b(first.tobytes(), digest_size=4, key=self._key).hexdigest()
