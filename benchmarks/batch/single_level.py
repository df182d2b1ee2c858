"""The best plan with one level of shared prefixes, for comparison: BatchLLM's attention kernel knows one level (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_prefill.core.batch import prefix_order, row_tree
from sgl_prefill.core.batch.batch_plan import JobPlan, planned
from sgl_prefill.core.batch.row_tree import ROOT, PrefixNode
from sgl_prefill.core.batch.token_rows import TokenRows


class Group(NamedTuple):
    """Rows that are computed after one prefix of theirs."""

    n_prefix_tokens: int  # 0: they share nothing
    rows: list[int]  # places in the order of the rows

    @property
    def saved_tokens(self) -> int:
        """Counts what need not be computed: the prefix, for all of them but one."""
        return self.n_prefix_tokens * (len(self.rows) - 1)


def single_level_groups(nodes: Sequence[PrefixNode], n_rows: int) -> Iterator[Group]:
    """Assigns each row to one of the prefixes that it begins with, so that most tokens are saved where only one level of
    sharing is used.

    This is what Algorithm 1 approximates bottom-up: it forks a prefix where `gain > penalty`, each for itself. Neither its
    published form is optimal: it charges the last rows that leave a group for a prefix that is no longer computed, and a
    fork that pays on its own level may not pay under a longer prefix. Here the choice is exact. Let a row that joins a prefix of
    `a` tokens save `a`, and each prefix that is used cost its length once. With a prefix of `a` tokens in use above it,
    the subtree of a node of `d` tokens saves at most

        best(a) = max(join(a), join(d) - d)    join(a) = a for each row directly below, + best(a) of each child

    which is convex in `a`; so one number a node tells whether it is used: the `a` from which on joining is no worse.
    """
    use_below = _thresholds(nodes)
    owners: list[int] = []  # of each node: the longest prefix in use for its rows
    members: dict[int, list[int]] = {ROOT: []}
    for number, node in enumerate(nodes):
        above = owners[node.parent] if node.parent != ROOT else ROOT
        is_used = (nodes[above].n_tokens if above != ROOT else 0) < use_below[number]
        owners.append(number if is_used else above)
    owner_of_row = [ROOT] * n_rows
    for number, node in enumerate(nodes):  # parents come first: what remains is the deepest node of a row
        owner_of_row[node.first : node.end] = [owners[number]] * node.n_rows
    for row, owner in enumerate(owner_of_row):
        members.setdefault(owner, []).append(row)
    for owner, rows in members.items():
        if owner != ROOT:
            yield Group(nodes[owner].n_tokens, rows)
        elif rows:
            yield from (Group(0, [row]) for row in rows)


class _Savings(NamedTuple):
    """What a subtree saves, by the length of the prefix in use above it: a convex function on 0 to `right`."""

    at_right: float
    slope: float  # on the left of `right`
    bends: list[tuple[float, float]]  # (where, how much steeper it is on the right of it), from left to right


def _thresholds(nodes: Sequence[PrefixNode]) -> list[float]:
    """Returns for each node: it is used where the prefix in use above it is shorter than this."""
    thresholds = [0.0] * len(nodes)
    below: list[list[_Savings]] = [[] for _ in nodes]
    rows_below = [0] * len(nodes)
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        n_alone = node.n_rows - rows_below[number]
        join = _Savings(
            n_alone * node.n_tokens + sum(each.at_right for each in below[number]),
            n_alone + sum(each.slope for each in below[number]),
            sorted(bend for each in below[number] for bend in each.bends),
        )
        below[number] = []
        floor = join.at_right - node.n_tokens
        thresholds[number] = threshold = _where_it_falls_to(floor, join, node.n_tokens)
        if node.parent != ROOT:
            rows_below[node.parent] += node.n_rows
            below[node.parent].append(_cut(join, node.n_tokens, nodes[node.parent].n_tokens, threshold, floor))
    return thresholds


def _where_it_falls_to(value: float, savings: _Savings, right: float) -> float:
    """Returns where the function, followed to the left, is no more than a value; 0 where it never is."""
    at, here, slope = right, savings.at_right, savings.slope
    for where, steeper in reversed(savings.bends):
        if here - slope * (at - where) <= value:
            break
        at, here, slope = where, here - slope * (at - where), slope - steeper
    return max(at - (here - value) / slope, 0.0) if slope > 0 else 0.0


def _cut(savings: _Savings, right: float, new_right: float, threshold: float, floor: float) -> _Savings:
    """Returns the function on 0 to `new_right`, and nowhere less than `floor`, to which it falls at `threshold`."""
    if threshold >= new_right:
        return _Savings(floor, 0.0, [])
    at_right, slope, bends = savings.at_right, savings.slope, list(savings.bends)
    while bends and bends[-1][0] >= new_right:
        where, steeper = bends.pop()
        at_right, slope, right = at_right - slope * (right - where), slope - steeper, where
    at_right -= slope * (right - new_right)
    if threshold > 0:
        kept = [bend for bend in bends if bend[0] > threshold]
        bends = [(threshold, slope - sum(steeper for _, steeper in kept)), *kept]
    return _Savings(at_right, slope, bends)


def single_level(rows: TokenRows, page_size: int = 1) -> JobPlan:
    """Plans groups that share one prefix each, larger ones last (section 4.3.2 with outputs of one length, equation 4)."""
    order = prefix_order.sort(rows)
    reusable = order.reusable_tokens(rows.lengths, page_size).tolist()
    lengths = rows.lengths[order.rows]
    groups = single_level_groups(row_tree.build(reusable), len(rows))

    def n_tokens(group: Group) -> int:
        return int(lengths[group.rows].sum()) - group.saved_tokens

    in_order = sorted(groups, key=n_tokens)
    places = np.array([row for group in in_order for row in group.rows], np.int64)
    reused = [n for group in in_order for n in (0, *[group.n_prefix_tokens] * (len(group.rows) - 1))]
    return planned(order.rows[places] if len(places) else order.rows, np.array(reused, np.int64))
