"""How much of a prompt SGLang's prefix cache holds, without touching it.

`RadixCache.match_prefix` refreshes access times and splits nodes: calling it for every waiting request would make the
queue, not the traffic, decide what is evicted. This walk reads and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_prefill.core.match_index import Match

if TYPE_CHECKING:
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode


def find_match(
    cache: RadixCache,
    token_ids: array[int],
    extra_key: str | None,
    start: tuple[TreeNode, int] | None = None,
) -> Match:
    """The longest prefix of `token_ids` in the tree, in whole KV pages, as `match_prefix` would report it.

    `start`: (node, tokens from the root to its end) up to which the prompt is known to match; None means the root. Costs
    O(what is matched) comparisons at memcmp speed. A disabled cache holds nothing.
    """
    node, n_matched = start or (cache.root_node, 0)
    if cache.disable:
        return Match(node, 0, None, is_inside=False)
    page_size = cache.page_size
    key = RadixKey(token_ids[n_matched:] if n_matched else token_ids, extra_key).page_aligned(page_size)
    while len(key) > 0:
        child_key = key.child_key(page_size)
        # `.get`, never `[]`: a node's children are a defaultdict, which would grow a child on lookup.
        child = node.children.get(child_key)
        if child is None:
            return Match(node, n_matched, child_key, is_inside=False)
        n_here = child.key.match(key, page_size=page_size)
        n_matched += n_here
        key, node = key[n_here:], child
        if n_here < len(child.key):
            return Match(node, n_matched, key.child_key(page_size) if len(key) > 0 else None, is_inside=True)
    return Match(node, n_matched, None, is_inside=False)


def count_cached_tokens(cache: RadixCache, token_ids: array[int], extra_key: str | None) -> int:
    """Length of that prefix."""
    return find_match(cache, token_ids, extra_key).n_tokens
