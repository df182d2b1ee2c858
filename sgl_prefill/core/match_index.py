"""Finds the waiting jobs whose match a change of the prefix cache affects: continuous calibration without matching all again.

A job's match, the longest prefix of it that the tree of cached prefixes holds, changes only when the tree changes where the
match ends. So jobs are filed under that place:

    at the end of a node   the next page of the job has no child there: filed under that page (`next_key`), so that a new
                           child concerns those alone whose match it may continue
    inside a node          the job leaves the node's tokens half-way, or is exhausted there

and the tree's three events name the places: a child was added, a node was split in two, a leaf was removed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

from sgl_prefill.core.job import Job
from sgl_prefill.core.prefix_tree import Match


class Group(NamedTuple):
    """Jobs that wait for the same page."""

    leader: Job  # which came first
    n_members: int


_Key = tuple[int | None, Hashable | None]


class MatchIndex:
    """All waiting jobs by the place where their match ends. Every method costs O(jobs concerned).

    Jobs at one place that go on with the same page are a group: the first to run computes that page for all.
    """

    def __init__(self) -> None:
        self._matches: dict[Job, Match] = {}
        # Of each node, by (tokens from the root where a match ends inside the node, else None; the next page).
        # Dictionaries as sets that remember the order, so that runs are alike.
        self._groups: dict[Hashable, dict[_Key, dict[Job, None]]] = {}
        self._changed: dict[tuple[Hashable, _Key], None] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(self._matches)

    def match_of(self, job: Job) -> Match:
        return self._matches[job]

    def place(self, job: Job, match: Match) -> None:
        """Files a job under its match; it follows the jobs that already wait for the same page."""
        if job in self._matches:
            self.remove(job)
        self._matches[job] = match
        key = _key(match)
        group = self._groups.setdefault(match.node, {}).setdefault(key, {})
        job.next_page, job.is_follower = match.next_page, match.next_key is not None and bool(group)
        group[job] = None
        self._changed[match.node, key] = None

    def remove(self, job: Job) -> None:
        """Removes a job that runs, was cancelled or refused."""
        match = self._matches.pop(job)
        key, groups = _key(match), self._groups[match.node]
        del groups[key][job]
        self._changed[match.node, key] = None
        if not groups[key]:
            del groups[key]
        if not groups:
            del self._groups[match.node]

    def is_wanted(self, node: Hashable) -> bool:
        """Says whether a waiting job would use this node. Of a node with children only what ends at it itself is looked at."""
        return node in self._groups

    def wanted_nodes(self) -> list[Any]:
        """Lists the nodes at which a match ends; their ancestors are wanted too."""
        return list(self._groups)

    def group_of(self, job: Job) -> Collection[Job]:
        """Returns the jobs whose match ends at the same place and that go on with the same page, the one that came first,
        first."""
        match = self._matches[job]
        return self._groups[match.node][_key(match)].keys()

    def child_added(self, parent: Hashable, key: Hashable | None) -> list[Job]:
        """Returns the jobs that the new child of `parent` under `key` continues: the caller matches them on from there."""
        return list(self._groups.get(parent, {}).get((None, key), ()))

    def split(self, lower: Hashable, upper: Hashable, n_tokens: int) -> list[Job]:
        """Follows a split: `upper` took the part of `lower` that ends `n_tokens` from the root. No match gets longer or
        shorter. Returns the jobs that have another `next_page` now."""
        moved = []
        for (inside_tokens, _), group in list(self._groups.get(lower, {}).items()):
            if inside_tokens is not None and inside_tokens <= n_tokens:
                for job in list(group):
                    match = self._matches[job]
                    self.place(job, match._replace(node=upper, is_inside=inside_tokens < n_tokens))
                    moved.append(job)
        return moved

    def at_node(self, node: Hashable) -> list[Job]:
        """Returns the jobs whose match ends at or inside a node."""
        return [job for group in self._groups.get(node, {}).values() for job in group]

    def take_changed_groups(self) -> list[Group]:
        """Returns the groups that gained or lost a member since the last call, and still have one."""
        changed, self._changed = self._changed, {}
        found = []
        for node, key in changed:
            group = self._groups.get(node, {}).get(key)
            if group is not None and key[1] is not None:
                found.append(Group(next(iter(group)), len(group)))
        return found


def _key(match: Match) -> _Key:
    return (match.n_tokens if match.is_inside else None), match.next_key
