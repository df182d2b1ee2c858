"""Continuous calibration: what the prefix cache holds of each waiting job, kept up to date (PrefillOnly, section 6.3).

The paper matches every waiting request anew in each step. Here each is matched once, when it arrives, and then only where the
tree changes below its match (`match_index`); the order that follows is the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sgl_prefill.core.job import Job
from sgl_prefill.core.kv_advisor import KVAdvisor
from sgl_prefill.core.match_index import MatchIndex
from sgl_prefill.core.policy import Policy
from sgl_prefill.core.prefix_tree import Match, PrefixTree


class Calibration:
    """Listens to a prefix cache and passes every changed job to the policy."""

    def __init__(self, tree: PrefixTree, policy: Policy, cost: AbstractContextManager[Any] | None = None) -> None:
        """cost: a timer, entered while the advisor computes."""
        self.policy = policy
        policy.count_shared = tree.count_shared_tokens
        self._tree = tree
        self._index = MatchIndex()
        self.n_wanted_removals = self.n_wanted_removed_tokens = 0  # evicted prefixes that waiting jobs would have used
        self.advisor = KVAdvisor(tree, self._index, cost or nullcontext())

    def add(self, job: Job) -> None:
        """Adds a job to the queue."""
        self._file(job, self._tree.match(job))
        self._count_sharers()
        self.policy.add(job)

    def remove(self, job: Job) -> None:
        """Removes a job that starts, or was aborted."""
        self._index.remove(job)
        self.policy.remove(job)
        self._count_sharers()

    def child_added(self, child: Any) -> None:
        """Called for a new node: jobs that waited for its first page are matched on from its parent."""
        parent = self._tree.parent(child)
        concerned = self._index.child_added(parent, self._tree.key(child))
        if not concerned:
            return
        start = (parent, self._tree.end_tokens(parent))
        for job in concerned:
            self._file(job, self._tree.match(job, start))
        self.policy.prefix_computed(concerned)
        for job in concerned:
            self.policy.recalibrated(job)
        self._count_sharers()

    def split(self, upper: Any, lower: Any) -> None:
        """Called when a node was split in two: no match changes its length."""
        for job in self._index.split(lower, upper, self._tree.end_tokens(upper)):
            self.policy.recalibrated(job)

    def leaf_removed(self, leaf: Any) -> None:
        """Called when a leaf was evicted: jobs that matched it now match its parent."""
        concerned = self._index.at_node(leaf)
        if not concerned:
            return
        parent = self._tree.parent(leaf)
        match = Match(parent, self._tree.end_tokens(parent), self._tree.key(leaf), is_inside=False)
        self.n_wanted_removals += 1
        self.n_wanted_removed_tokens += max(self._index.match_of(job).n_tokens for job in concerned) - match.n_tokens
        for job in concerned:
            self._file(job, match)
            self.policy.recalibrated(job)
        self._count_sharers()

    def cleared(self) -> None:
        """Called when the cache was emptied: all jobs are matched again."""
        for job in list(self._index):
            self._file(job, self._tree.match(job))
            self.policy.recalibrated(job)
        self._count_sharers()

    def _file(self, job: Job, match: Match) -> None:
        self._index.place(job, match)
        job.n_cached_tokens = min(match.n_tokens, job.most_cached_tokens)
        job.n_sharers = job.n_shared_tokens = 0
        if job.is_follower:
            leader = next(iter(self._index.group_of(job)))
            if leader.n_shared_tokens == 0:  # what two of them share stands for all
                leader.n_shared_tokens = self._tree.count_shared_tokens(leader, job)
            job.n_shared_tokens = min(leader.n_shared_tokens, job.most_cached_tokens)

    def _count_sharers(self) -> None:
        """Recounts; the leader of each group speaks for all: what it would compute, the others will find."""
        for leader, n_members in self._index.take_changed_groups():
            n_sharers = n_members - 1
            if leader.is_follower or leader.n_sharers != n_sharers:
                leader.is_follower, leader.n_sharers = False, n_sharers
                leader.n_shared_tokens = leader.n_shared_tokens if n_sharers else 0
                self.policy.recalibrated(leader)
