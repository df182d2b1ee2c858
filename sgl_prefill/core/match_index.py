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


class Group(NamedTuple, Generic[Request]):
    """Requests that wait for the same page."""

    first: Request  # which came first
    second: Request | None
    n_members: int


_Key = tuple[int | None, Hashable | None]


class MatchIndex(Generic[Request]):
    """All waiting requests by the place where their match ends. Every method costs O(requests concerned).

    Requests at one place that go on with the same page are a group: whichever runs first computes that page for all.
    """

    def __init__(self) -> None:
        self._matches: dict[Request, Match] = {}
        # Of each node, by (tokens from the root where a match ends inside the node, else None; the next page).
        # Dictionaries as sets that remember the order, so that runs are alike.
        self._groups: dict[Hashable, dict[_Key, dict[Request, None]]] = {}
        self._changed: dict[tuple[Hashable, _Key], None] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._matches)

    def match_of(self, request: Request) -> Match:
        return self._matches[request]

    def place(self, request: Request, match: Match) -> None:
        """File a request, or file it anew."""
        if request in self._matches:
            self.remove(request)
        self._matches[request] = match
        key = _key(match)
        self._groups.setdefault(match.node, {}).setdefault(key, {})[request] = None
        self._changed[match.node, key] = None

    def remove(self, request: Request) -> None:
        """Forget a request: it runs, was cancelled or refused."""
        match = self._matches.pop(request)
        key, groups = _key(match), self._groups[match.node]
        del groups[key][request]
        self._changed[match.node, key] = None
        if not groups[key]:
            del groups[key]
        if not groups:
            del self._groups[match.node]

    def is_wanted(self, node: Hashable) -> bool:
        """A waiting request would use this node. Of a node with children only what ends at it itself is looked at."""
        return node in self._groups

    def wanted_nodes(self) -> list[Any]:
        """Nodes at which a match ends; their ancestors are wanted too."""
        return list(self._groups)

    def at_place(self, match: Match) -> list[Request]:
        """Requests whose match ends at the same place, and that go on with the same page."""
        return list(self._groups.get(match.node, {}).get(_key(match), ()))

    def child_added(self, parent: Hashable, key: Hashable | None) -> list[Request]:
        """Requests that the new child of `parent` under `key` continues: the caller matches them on from there."""
        return list(self._groups.get(parent, {}).get((None, key), ()))

    def split(self, lower: Hashable, upper: Hashable, n_tokens: int) -> None:
        """`upper` took the part of `lower` that ends `n_tokens` from the root. No match gets longer or shorter."""
        for (inside_tokens, _), group in list(self._groups.get(lower, {}).items()):
            if inside_tokens is not None and inside_tokens <= n_tokens:
                for request in list(group):
                    match = self._matches[request]
                    self.place(request, match._replace(node=upper, is_inside=inside_tokens < n_tokens))

    def leaf_removed(self, leaf: Hashable, parent: Hashable, n_tokens: int, key: Hashable) -> list[Request]:
        """Matches that ended in `leaf` now end with `parent`, `n_tokens` from the root. Returns whose they are."""
        concerned = [request for group in self._groups.get(leaf, {}).values() for request in group]
        for request in concerned:
            self.place(request, Match(parent, n_tokens, key, is_inside=False))
        return concerned

    def take_changed_groups(self) -> list[Group[Request]]:
        """Those that gained or lost a member since the last call, and still have one."""
        changed, self._changed = self._changed, {}
        found = []
        for node, key in changed:
            group = self._groups.get(node, {}).get(key)
            if group is not None and key[1] is not None:
                members = iter(group)
                found.append(Group(next(members), next(members, None), len(group)))
        return found


def _key(match: Match) -> _Key:
    return (match.n_tokens if match.is_inside else None), match.next_key
