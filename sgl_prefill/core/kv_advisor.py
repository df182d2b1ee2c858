"""What the KV side may ask about waiting jobs. Nothing else passes from the policy to memory management."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_plan import available_beside_wanted
from sgl_prefill.core.match_index import MatchIndex
from sgl_prefill.core.prefix_tree import PrefixTree


class KVAdvisor:
    """Knows which cached prefixes waiting jobs will use. Whether they do is for the cache to act on."""

    def __init__(self, tree: PrefixTree, index: MatchIndex, cost: AbstractContextManager[Any]) -> None:
        self._tree, self._index, self._cost = tree, index, cost

    def is_wanted(self, leaf: Any) -> bool:
        """Says whether a waiting job would use this leaf of the tree."""
        return self._index.is_wanted(leaf)

    def room_for(self, job: Job, n_cached: int, n_missing: int, n_free: int) -> int:
        """Counts the durable slots for a job that is about to run: free ones, and cached ones that no waiting job will use.

        Args:
            n_cached: tokens of it that the cache holds, and that are locked.
            n_missing: slots that it would take at most, in whole pages. If so many are free, waiting jobs are not looked at.
            n_free: free slots.
        """
        n_available = n_free + self._tree.evictable_tokens()
        if n_missing <= n_free:
            return n_available
        with self._cost:
            n_shared, n_wanted = self._shared_tokens(job), self._wanted_evictable_tokens()
        return available_beside_wanted(n_cached, n_shared, n_available, n_wanted)

    def _shared_tokens(self, job: Job) -> int:
        """Returns the length of the longest prefix that a job shares with another that waits; its own cached part at least."""
        match = self._index.match_of(job)
        n_shared = match.n_tokens
        if match.next_key is None:  # it has no further page to share; others that end here may be of another namespace
            return n_shared
        for other in self._index.group_of(job):
            # Who differs at the end of what is shared so far cannot share more.
            is_longer = other.tokens[n_shared : n_shared + 1] == job.tokens[n_shared : n_shared + 1]
            if other is not job and is_longer:
                n_shared = max(n_shared, self._tree.count_shared_tokens(job, other))
        return n_shared

    def _wanted_evictable_tokens(self) -> int:
        """Counts the cached tokens that waiting jobs would use and that eviction could take. Costs O(places)."""
        seen: set[Any] = set()
        n_tokens = 0
        for node in self._index.wanted_nodes():
            while node not in seen and self._tree.parent(node) is not None:
                seen.add(node)
                n_tokens += self._tree.evictable_tokens(node)
                node = self._tree.parent(node)
        return n_tokens
