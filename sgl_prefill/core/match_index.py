"""Which waiting requests a change of the prefix cache concerns: continuous calibration without matching anew.

A request's match, the longest prefix of it that the tree of cached prefixes holds, changes only when the tree changes where
the match ends. So requests are filed under that place:

    at the end of a node   the next page of the request has no child there: filed under that page (`next_key`), so that a new
                           child concerns those alone whose match it may continue
    inside a node          the request leaves the node's tokens half-way, or is exhausted there

and the tree's three events name the places: a child was added, a node was split in two, a leaf was removed. Nodes and keys
are opaque; any tree whose children differ in their first page will do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Request = TypeVar("Request", bound=Hashable)


class Match(NamedTuple):
    """Where a request leaves the tree."""

    node: Hashable
    n_tokens: int  # matched, from the root on
    next_key: Hashable | None  # the first page beyond the match; None where the request has no further page
    is_inside: bool  # the node goes on where the request leaves it

    @property
    def place(self) -> tuple[Hashable, int, Hashable | None]:
        """Two requests at one place with a next key share at least one more page, which nobody has cached yet."""
        return self.node, self.n_tokens, self.next_key


class MatchIndex(Generic[Request]):
    """All waiting requests by the place where their match ends. Every method costs O(requests concerned)."""

    def __init__(self) -> None:
        self._matches: dict[Request, Match] = {}
        # Dictionaries as sets that remember the order, so that runs are alike.
        self._at_end: dict[Hashable, dict[Hashable | None, dict[Request, None]]] = {}
        self._inside: dict[Hashable, dict[Request, None]] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._matches)

    def match_of(self, request: Request) -> Match:
        return self._matches[request]

    def place(self, request: Request, match: Match) -> None:
        """File a request, or file it anew."""
        if request in self._matches:
            self.remove(request)
        self._matches[request] = match
        if match.is_inside:
            self._inside.setdefault(match.node, {})[request] = None
        else:
            self._at_end.setdefault(match.node, {}).setdefault(match.next_key, {})[request] = None

    def remove(self, request: Request) -> None:
        """Forget a request: it runs, was cancelled or refused."""
        match = self._matches.pop(request)
        if match.is_inside:
            _drop(self._inside, match.node, request)
            return
        by_key = self._at_end[match.node]
        _drop(by_key, match.next_key, request)
        if not by_key:
            del self._at_end[match.node]

    def is_wanted(self, node: Hashable) -> bool:
        """A waiting request would use this node. Of a node with children only what ends at it itself is looked at."""
        return node in self._at_end or node in self._inside

    def wanted_nodes(self) -> set[Any]:
        """Nodes at which a match ends; their ancestors are wanted too."""
        return {*self._at_end, *self._inside}

    def at_place(self, match: Match) -> list[Request]:
        """Requests whose match ends at the same place, and that go on with the same page."""
        if match.is_inside:
            return [r for r in self._inside.get(match.node, ()) if self._matches[r].place == match.place]
        return self.child_added(match.node, match.next_key)

    def child_added(self, parent: Hashable, key: Hashable | None) -> list[Request]:
        """Requests that the new child of `parent` under `key` continues: the caller matches them on from there."""
        return list(self._at_end.get(parent, {}).get(key, ()))

    def split(self, lower: Hashable, upper: Hashable, n_tokens: int) -> None:
        """`upper` took the part of `lower` that ends `n_tokens` from the root. No match gets longer or shorter."""
        for request in list(self._inside.get(lower, ())):
            match = self._matches[request]
            if match.n_tokens <= n_tokens:
                self.place(request, match._replace(node=upper, is_inside=match.n_tokens < n_tokens))

    def leaf_removed(self, leaf: Hashable, parent: Hashable, n_tokens: int, key: Hashable) -> list[Request]:
        """Matches that ended in `leaf` now end with `parent`, `n_tokens` from the root. Returns whose they are."""
        concerned = [*self._inside.get(leaf, ())]
        for requests in self._at_end.get(leaf, {}).values():
            concerned.extend(requests)
        for request in concerned:
            self.place(request, Match(parent, n_tokens, key, is_inside=False))
        return concerned


def _drop(sets: dict[Any, dict[Request, None]], key: Hashable | None, request: Request) -> None:
    members = sets[key]
    del members[request]
    if not members:
        del sets[key]
