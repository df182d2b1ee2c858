"""Which requests of a step share a prefix, so that it is attended once for all of them (BatchLLM, section 5).

A KV slot belongs to one position of one prefix: two requests share their first p positions where both have the same slot at
position p - 1. So the radix tree is not needed, and a shared length is found by halving, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# On a CPU a shorter prefix is cheaper read again by each than kept apart.
MIN_SHARED_TOKENS = 32


class Group(NamedTuple):
    """Requests that share their first positions; a request that shares none is a group of its own."""

    members: tuple[int, ...]
    shared_tokens: int  # 0 of a lone one

    @property
    def saved_tokens(self) -> int:
        return (len(self.members) - 1) * self.shared_tokens


def shared_groups(
    slot: Callable[[int, int], int], cached_tokens: Sequence[int], min_shared_tokens: int = MIN_SHARED_TOKENS
) -> list[Group]:
    """Groups of the requests 0 .. n - 1, each in one, that save the most positions by sharing their whole group's prefix.

    slot: the KV slot of (request, position). cached_tokens: of each request, in the prefix cache when the step began. Costs
    O(requests * log(longest prefix)) slots a level of the tree.
    """
    alone = [request for request, n_cached in enumerate(cached_tokens) if n_cached < min_shared_tokens]
    sharing = [request for request, n_cached in enumerate(cached_tokens) if n_cached >= min_shared_tokens]
    groups = _best_groups(sharing, min_shared_tokens, slot, cached_tokens)
    return groups + groups_of_one(alone)


def groups_of_one(requests: Iterable[int]) -> list[Group]:
    return [Group((request,), 0) for request in requests]


def _best_groups(
    requests: Sequence[int], at_least: int, slot: Callable[[int, int], int], cached_tokens: Sequence[int]
) -> list[Group]:
    """Groups requests that have `at_least` cached positions: those with the same slots there together, or finer where that
    saves more."""
    by_slot: dict[int, list[int]] = {}
    for request in requests:
        by_slot.setdefault(slot(request, at_least - 1), []).append(request)
    groups: list[Group] = []
    for members in by_slot.values():
        if len(members) == 1:
            groups += groups_of_one(members)
            continue
        n_shared = min(_shared_tokens(members[0], other, at_least, slot, cached_tokens) for other in members[1:])
        whole = Group(tuple(members), n_shared)
        deeper = [request for request in members if cached_tokens[request] > n_shared]
        finer = _best_groups(deeper, n_shared + 1, slot, cached_tokens) if len(deeper) > 1 else []
        if sum(group.saved_tokens for group in finer) > whole.saved_tokens:
            apart = set(members) - set(deeper)
            groups += [*finer, *groups_of_one(sorted(apart))]
        else:
            groups.append(whole)
    return groups


def _shared_tokens(
    one: int, other: int, at_least: int, slot: Callable[[int, int], int], cached_tokens: Sequence[int]
) -> int:
    shared, end = at_least, min(cached_tokens[one], cached_tokens[other])
    while shared < end:
        middle = (shared + end + 1) // 2
        if slot(one, middle - 1) == slot(other, middle - 1):
            shared = middle
        else:
            end = middle - 1
    return shared
