"""SGLang's radix cache, which reports every change of its tree: what the waiting queue must know to stay calibrated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class TreeListener(Protocol):
    """Hears of each change once it is made, and says what waiting requests would use (see CalibratedQueue)."""

    def child_added(self, child: TreeNode) -> None: ...

    def split(self, upper: TreeNode, lower: TreeNode) -> None: ...

    def leaf_removed(self, leaf: TreeNode) -> None: ...

    def cleared(self) -> None: ...

    def is_wanted(self, leaf: TreeNode) -> bool: ...

    def available_slots(self, req: Req, n_cached: int, n_missing: int, n_free: int) -> int: ...


class WatchedRadixCache(RadixCache):  # type: ignore[misc]
    """Behaves as its base. All changes of the tree's shape go through the four methods below."""

    listener: TreeListener | None = None
    eviction_strategy: Any

    def evict_unwanted_first(self, n_tokens: int) -> None:
        """Evict as SGLang does, but what waiting requests would use only after all else."""
        if n_tokens <= 0:
            return
        if self.listener is None:
            self.evict(EvictParams(num_tokens=n_tokens))
            return
        strategy = self.eviction_strategy
        self.eviction_strategy = _UnwantedFirst(self.listener, strategy)
        try:
            self.evict(EvictParams(num_tokens=n_tokens))
        finally:
            self.eviction_strategy = strategy

    def reset(self) -> None:
        super().reset()
        if self.listener is not None:
            self.listener.cleared()

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if self.listener is not None:
            self.listener.split(upper, child)
        return upper

    def _insert_helper(self, node: TreeNode, key: RadixKey, value: Any, *rest: Any) -> tuple[int, TreeNode]:
        n_present, last = super()._insert_helper(node, key, value, *rest)
        if self.listener is not None and n_present < len(key):
            self.listener.child_added(last)
        return n_present, last

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        if self.listener is not None:
            self.listener.leaf_removed(node)


class _UnwantedFirst:
    """An eviction strategy around SGLang's."""

    def __init__(self, listener: TreeListener, strategy: Any) -> None:
        self._listener, self._strategy = listener, strategy

    def get_priority(self, node: TreeNode) -> tuple[bool, Any]:
        return self._listener.is_wanted(node), self._strategy.get_priority(node)


def end_tokens(node: TreeNode) -> int:
    """Tokens from the root to the node's end."""
    n_tokens = 0
    while node.parent is not None:
        n_tokens += len(node.key)
        node = node.parent
    return n_tokens
