"""Interface of a prefix cache for calibration and the KV advisor: read-only queries, and events. Nodes are opaque.

Any tree will do whose children differ in their first page. SGLang's radix cache is one (`port.kv.radix_cache`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from sgl_prefill.core.job import Job


class Match(NamedTuple):
    """Where a job leaves the tree."""

    node: Hashable
    n_tokens: int  # matched, from the root on
    next_key: Hashable | None  # the first page beyond the match; None where the job has no further page
    is_inside: bool  # the node goes on where the job leaves it

    @property
    def next_page(self) -> Hashable | None:
        """Names the next page of a job: two jobs with the same one share at least that page, which is not cached yet."""
        return None if self.next_key is None else (self.node, self.n_tokens, self.next_key)


class PrefixTree(Protocol):
    """Reading it changes nothing: no access time, no split node."""

    @property
    def page_size(self) -> int:
        """Tokens of a page; prefixes are shared in whole pages."""
        ...

    def match(self, job: Job, start: tuple[Any, int] | None = None) -> Match:
        """Finds the longest prefix of a job in the tree. start: (node, tokens from the root to its end) known to match."""
        ...

    def count_shared_tokens(self, one: Job, other: Job) -> int:
        """Counts what two jobs in one namespace share, in whole pages."""
        ...

    def parent(self, node: Any) -> Any:
        """Returns the node above; None of the root."""
        ...

    def key(self, node: Any) -> Hashable:
        """Returns a node's first page: its parent knows it under that."""
        ...

    def end_tokens(self, node: Any) -> int:
        """Counts the tokens from the root to the node's end."""
        ...

    def evictable_tokens(self, node: Any = None) -> int:
        """Counts the tokens that eviction could take: of this node itself, or of the whole tree."""
        ...


class TreeListener(Protocol):
    """Receives each change of the tree, after it was made."""

    def child_added(self, child: Any) -> None: ...

    def split(self, upper: Any, lower: Any) -> None: ...

    def leaf_removed(self, leaf: Any) -> None: ...

    def cleared(self) -> None: ...
