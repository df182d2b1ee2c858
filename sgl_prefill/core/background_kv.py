"""Limits what background jobs hold of the prefix cache: otherwise they would evict what live requests use.

A prefix that any live request has used counts as live. Background jobs may hold free slots, and beyond these at most a
fixed share of the cache: live requests find nearly all of their prefixes, and a job keeps the prefixes of its current groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

SHARE = 0.25


class BackgroundKV:
    """The nodes of a prefix cache that only background jobs have used."""

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._n_tokens_of: dict[Hashable, int] = {}
        self.n_tokens = 0  # of all nodes here

    def __contains__(self, node: Hashable) -> bool:
        return node in self._n_tokens_of

    def added(self, node: Hashable, n_tokens: int) -> None:
        """Called for a new node that a background job computed."""
        self._n_tokens_of[node] = n_tokens
        self.n_tokens += n_tokens

    def split(self, upper: Hashable, lower: Hashable, n_upper_tokens: int) -> None:
        """Called when `upper` took the first tokens of `lower`."""
        if lower in self._n_tokens_of:
            self._n_tokens_of[lower] -= n_upper_tokens
            self._n_tokens_of[upper] = n_upper_tokens

    def removed(self, node: Hashable) -> None:
        """Called when a node was evicted, or used by a live request."""
        self.n_tokens -= self._n_tokens_of.pop(node, 0)

    def cleared(self) -> None:
        self._n_tokens_of.clear()
        self.n_tokens = 0

    @property
    def n_tokens_more(self) -> int:
        """Slots that background jobs may still take from live requests' prefixes."""
        return max(int(SHARE * self._kv_tokens) - self.n_tokens, 0)

    def evictable_tokens(self, evictable: Callable[[Any], int]) -> int:
        """Counts the tokens of these nodes that eviction could take. evictable: of one node."""
        return sum(evictable(node) for node in self._n_tokens_of)

    def used_by_live(self, nodes: Iterable[Hashable]) -> None:
        """Called when a live request used these nodes."""
        for node in nodes:
            self.removed(node)
