"""Prefixes of tenants, and those that all share, in SGLang's real tree."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_prefill.core.job import Job
from sgl_prefill.port.kv.namespaces import Namespace
from sgl_prefill.port.kv.radix_cache import RadixTree, WatchedRadixCache
from tests.cpu.test_scheduling_glue import count_cached_tokens, insert, watched_tree

ANN, BOB, NOBODY = Namespace("a/"), Namespace("b/"), Namespace("/")
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def tree_with(public: list[int], page_size: int = 1) -> WatchedRadixCache:
    """As the start of a server leaves it."""
    tree = watched_tree(page_size)
    tree.share(array("q", public))
    insert(tree, public, NOBODY)
    return tree


def n_common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(
    PROMPTS,
    st.lists(st.tuples(st.sampled_from([ANN, BOB]), PROMPTS), max_size=12),
    st.sampled_from([ANN, BOB]),
    PROMPTS,
    st.sampled_from([1, 2]),
)
def test_a_tenant_finds_what_it_asked_itself_and_what_all_share(
    public: list[int], asked: list[tuple[Namespace, list[int]]], who: Namespace, prompt: list[int], page_size: int
) -> None:
    """Counted by brute force, whatever others have asked and whatever is split; and by the probe alike."""
    tree = tree_with(public, page_size)
    for tenant, tokens in asked:
        insert(tree, tokens, tenant)
    own = [n_common(prompt, tokens) for tenant, tokens in asked if tenant == who]
    expected = max([n_common(prompt, public), *own]) // page_size * page_size
    assert count_cached_tokens(tree, prompt, who) == expected
    insert(tree, prompt, who)
    assert count_cached_tokens(tree, prompt, who) == len(prompt) // page_size * page_size


def test_what_all_share_stays_and_comes_back_after_a_flush() -> None:
    """Pinned at the start, and again by the first who computes it anew."""
    public = list(range(10))
    tree = tree_with(public)
    insert(tree, [*public, 20], ANN)
    tree.evict(EvictParams(num_tokens=100))
    assert count_cached_tokens(tree, public, BOB) == 10
    assert (tree.protected_size(), tree.evictable_size()) == (10, 0)
    tree.reset()
    assert count_cached_tokens(tree, public, BOB) == 0
    insert(tree, [*public[:5], 20], ANN)
    tree.evict(EvictParams(num_tokens=1))
    assert tree.protected_size() == 0, "half of it was computed"
    insert(tree, [*public, 20], ANN)
    tree.evict(EvictParams(num_tokens=100))
    assert (tree.protected_size(), tree.evictable_size()) == (10, 0)


@pytest.mark.parametrize("is_cached", [False, True])
def test_two_tenants_with_one_prompt_share_what_all_share_and_no_more(is_cached: bool) -> None:
    """Else a forecast would tell one that the other asks the same."""
    public = list(range(10))
    tree = tree_with(public)
    if not is_cached:
        tree.reset()
    one, other = (Job(array("q", [*public, *range(20, 40)]), 0.0, 29, namespace) for namespace in (ANN, BOB))
    probe = RadixTree(tree)
    assert probe.count_shared_tokens(one, other) == 10
    assert probe.count_shared_tokens(one, one) == 30
    assert (probe.match(one).next_page == probe.match(other).next_page) == (not is_cached)
