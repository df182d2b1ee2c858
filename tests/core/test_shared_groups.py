"""Which requests of a step attend a prefix together, on slots dealt out by a radix tree."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.shared_groups import MIN_SHARED_TOKENS, Group, shared_groups

EDGE_TOKENS = 17  # of every edge of the tree: half of what is worth sharing, and a bit


class Requests:
    """Requests as paths in a tree of edges of EDGE_TOKENS: two have the same slots as long as their paths agree."""

    def __init__(self, paths: Sequence[Sequence[int]], cached_tokens: Sequence[int]) -> None:
        self.cached_tokens = list(cached_tokens)
        self._paths = paths
        self._slots: dict[tuple[object, ...], int] = {}
        self.n_slots_read = 0

    def slot(self, request: int, position: int) -> int:
        """The same number for the same prefix; behind the path, positions of this request alone."""
        assert 0 <= position < self.cached_tokens[request], "only cached positions are looked at"
        self.n_slots_read += 1
        path, edges = self._paths[request], position // EDGE_TOKENS + 1
        prefix = tuple(path[:edges]) if edges <= len(path) else (tuple(path), request)
        return self._slots.setdefault((prefix, position), len(self._slots))

    def really_shared(self, one: int, other: int) -> int:
        """Counted position by position."""
        both = min(self.cached_tokens[one], self.cached_tokens[other])
        differing = (position for position in range(both) if self.slot(one, position) != self.slot(other, position))
        return next(differing, both)

    def groups(self) -> list[Group]:
        return shared_groups(self.slot, self.cached_tokens)


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    paths = draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=9))
    longest = EDGE_TOKENS * 8
    return Requests(paths, draw(st.lists(st.integers(0, longest), min_size=len(paths), max_size=len(paths))))


@given(requests())
def test_every_request_is_in_one_group_whose_members_share_what_it_says(step: Requests) -> None:
    groups = step.groups()
    assert sorted(member for group in groups for member in group.members) == list(range(len(step.cached_tokens)))
    for group in groups:
        if len(group.members) == 1:
            assert group.shared_tokens == 0
            continue
        assert group.shared_tokens >= MIN_SHARED_TOKENS
        shared = min(step.really_shared(group.members[0], other) for other in group.members[1:])
        assert group.shared_tokens == shared


@given(requests())
def test_never_saves_less_than_the_groups_of_the_first_level(step: Requests) -> None:
    """All that agree at the least length worth sharing, together."""
    by_slot: dict[int, list[int]] = {}
    for request, n_cached in enumerate(step.cached_tokens):
        if n_cached >= MIN_SHARED_TOKENS:
            by_slot.setdefault(step.slot(request, MIN_SHARED_TOKENS - 1), []).append(request)
    naive = sum(
        (len(members) - 1) * min(step.really_shared(members[0], other) for other in members)
        for members in by_slot.values()
    )
    assert sum(group.saved_tokens for group in step.groups()) >= naive


def test_a_deeper_pair_is_preferred_where_it_saves_more() -> None:
    """Three share 51 positions and two of them 255: the pair saves 255, all three together 102."""
    pair = [0] * 15
    step = Requests([pair, [0, 0, 0, 1], pair], [255, 100, 300])
    assert step.groups() == [Group((0, 2), 255), Group((1,), 0)]


def test_all_stay_together_where_a_deeper_pair_saves_less() -> None:
    """Four share 102 positions and two of them 204: all together save 306, the pair 204."""
    step = Requests([[0] * 12, [0] * 6 + [1], [0] * 12, [0] * 6 + [2]], [204, 150, 204, 150])
    assert step.groups() == [Group((0, 1, 2, 3), 102)]


def test_two_pairs_below_a_short_common_prefix_are_two_groups() -> None:
    """All four share 34 positions (102 saved); each pair 85 (170 saved)."""
    left, right = [0, 0, 1, 1, 1], [0, 0, 2, 2, 2]
    step = Requests([left, right, right, left], [90, 90, 90, 90])
    assert step.groups() == [Group((0, 3), 85), Group((1, 2), 85)]


def test_a_short_prefix_is_not_worth_sharing() -> None:
    """31 cached positions each, and a request without any."""
    step = Requests([[0, 0], [0, 0], []], [MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS - 1, 0])
    assert step.groups() == [Group((request,), 0) for request in range(3)]


def test_a_request_alone_and_none_at_all() -> None:
    assert Requests([[0] * 9], [153]).groups() == [Group((0,), 0)]
    assert shared_groups(lambda request, position: 0, []) == []


def test_long_prefixes_are_found_by_halving() -> None:
    """20 requests that share 100,000 positions look at a few hundred slots."""
    step = Requests([[0] * 5883] * 20, [100_000] * 20)
    assert step.groups() == [Group(tuple(range(20)), 100_000)]
    assert step.n_slots_read <= 20 * (1 + 2 * 17)
