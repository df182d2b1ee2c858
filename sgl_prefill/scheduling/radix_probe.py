"""How much of a prompt SGLang's prefix cache holds, without touching it.

`RadixCache.match_prefix` refreshes access times and splits nodes: calling it for every waiting request would make the
queue, not the traffic, decide what is evicted. This walk reads and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixCache


def count_cached_tokens(cache: RadixCache, token_ids: array[int], extra_key: str | None) -> int:
    """Length of the longest prefix of `token_ids` in the tree, in whole KV pages, as `match_prefix` would report it.

    Costs O(prefix) comparisons at memcmp speed. A disabled cache holds nothing.
    """
    if cache.disable:
        return 0
    key = RadixKey(token_ids=token_ids, extra_key=extra_key).page_aligned(cache.page_size)
    node, n_cached = cache.root_node, 0
    while len(key) > 0:
        # `.get`, never `[]`: a node's children are a defaultdict, which would grow a child on lookup.
        child = node.children.get(key.child_key(cache.page_size))
        if child is None:
            break
        n_matched = child.key.match(key, page_size=cache.page_size)
        n_cached += n_matched
        if n_matched < len(child.key):
            break
        key, node = key[n_matched:], child
    return n_cached
