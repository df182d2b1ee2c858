"""How much of the prefix cache background jobs may hold: they would otherwise evict what live requests use.

A prefix that a live request has used is its, whoever computed it. Background jobs hold slots that nobody else wants, and of the
others' at most a share: live requests find nearly all of their prefixes, and a job still has its present groups' prefixes.
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
        self.n_tokens = 0  # of all these nodes

    def __contains__(self, node: Hashable) -> bool:
        return node in self._n_tokens_of

    def added(self, node: Hashable, n_tokens: int) -> None:
        """Hears of a node that a background job has computed."""
        self._n_tokens_of[node] = n_tokens
        self.n_tokens += n_tokens

    def split(self, upper: Hashable, lower: Hashable, n_upper_tokens: int) -> None:
        """Hears that `upper` took the first tokens of `lower`."""
        if lower in self._n_tokens_of:
            self._n_tokens_of[lower] -= n_upper_tokens
            self._n_tokens_of[upper] = n_upper_tokens

    def removed(self, node: Hashable) -> None:
        """Hears that a node was evicted, or that a live request has used it."""
        self.n_tokens -= self._n_tokens_of.pop(node, 0)

    def cleared(self) -> None:
        self._n_tokens_of.clear()
        self.n_tokens = 0

    @property
    def n_tokens_more(self) -> int:
        """Counts the slots that background jobs may still take from others."""
        return max(int(SHARE * self._kv_tokens) - self.n_tokens, 0)

    def evictable_tokens(self, evictable: Callable[[Any], int]) -> int:
        """Counts the tokens of these nodes that eviction could take. evictable: of one node."""
        return sum(evictable(node) for node in self._n_tokens_of)

    def used_by_live(self, nodes: Iterable[Hashable]) -> None:
        """Hears that a live request has used these."""
        for node in nodes:
            self.removed(node)
