"""In which order the rows of a job run, and what each will find in the prefix cache (BatchLLM, sections 4.2 and 4.3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_prefill.core.batch import prefix_order, row_tree
from sgl_prefill.core.batch.token_rows import IntArray, TokenRows
from sgl_prefill.core.job import PlannedRow


class JobPlan(NamedTuple):
    """All rows, in the order in which they run. Arrays of one length."""

    rows: IntArray  # their numbers
    reused_tokens: IntArray
    ends: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, place: int) -> PlannedRow:
        following = int(self.reused_tokens[place + 1]) if place + 1 < len(self) else 0
        return PlannedRow(place, int(self.reused_tokens[place]), following, int(self.ends[place]))

    def places(self) -> IntArray:
        """Returns where each row stands in the order."""
        found = np.empty(len(self), np.int64)
        found[self.rows] = np.arange(len(self))
        return found

    @property
    def saved_tokens(self) -> int:
        """Counts the tokens that need not be computed."""
        return int(self.reused_tokens.sum())

    def group_begins(self) -> IntArray:
        """Returns the places at which a row shares nothing with the one before it: between two of them lies a group."""
        begins: IntArray = np.flatnonzero(self.reused_tokens == 0)
        return begins


def depth_first(rows: TokenRows, page_size: int = 1) -> JobPlan:
    """Plans the order that reuses most: the prefix tree depth first, all its levels. What it saves no order exceeds."""
    order = prefix_order.sort(rows)
    return planned(order.rows, order.reusable_tokens(rows.lengths, page_size))


def decode_first(plan: JobPlan, lengths: IntArray, output_tokens: IntArray, page_size: int = 1) -> JobPlan:
    """Puts what writes most for what it reads first, at every level of the tree (section 4.3.2, equations 3 and 4): what is read
    later fills the steps in which it writes. Saves as much as before.

    Args:
        plan: depth first, in sorted order.
        lengths: tokens of each row's prompt, by its number, as are
        output_tokens: that it is expected to write.
    """
    n_read = lengths[plan.rows]
    most_reused = np.maximum(n_read - 1, 0) // page_size * page_size
    computed, written = (
        np.concatenate([[0], np.cumsum(n)]) for n in (n_read - plan.reused_tokens, output_tokens[plan.rows])
    )

    def key(first: int, end: int, n_above: int) -> tuple[bool, float]:
        n_here = computed[end] - computed[first] + int(plan.reused_tokens[first]) - n_above
        # A row that is the prefix itself could reuse less of it than the others.
        return most_reused[first] >= n_above, -float(written[end] - written[first]) / max(float(n_here), 1.0)

    nodes = row_tree.build(plan.reused_tokens.tolist())
    placed = list(row_tree.with_siblings_sorted(nodes, len(plan), key))
    places = np.array([one.row for one in placed], np.int64)
    reused = np.array([one.n_shared_tokens for one in placed], np.int64)
    return planned(plan.rows[places], np.minimum(reused, most_reused[places]))


def shard(plan: JobPlan, lengths: IntArray, which: int, of: int) -> tuple[int, int]:
    """Returns the places (first, end) of one of several shards that compute about as many tokens each.

    A plan is cut where the rows on both sides share least, within a tenth of a shard around the even cut: what they share is
    computed on both sides.

    Args:
        lengths: tokens of each row, by its number.
        which: counted from 1.
    """
    computed = np.cumsum(lengths[plan.rows] - plan.reused_tokens)
    cuts = [0]
    for number in range(1, of):
        cuts.append(cheapest_cut(plan, computed, computed[-1] * number / of, computed[-1] * 0.1 / of, cuts[-1]))
    cuts.append(len(plan))
    return cuts[which - 1], cuts[which]


def cheapest_cut(plan: JobPlan, computed: IntArray, wanted: float, around: float, first: int) -> int:
    """Returns the place, from `first` on, that shares least with the one before it, of those before which about `wanted` tokens
    are computed; of several the nearest. The number of places where there is none.

    Args:
        computed: tokens, up to and with each place.
        around: so many tokens earlier or later will do.
    """
    low, even, high = (
        int(place) for place in np.maximum(np.searchsorted(computed, [wanted - around, wanted, wanted + around]), first)
    )
    candidates = np.arange(low, high + 1)[: max(len(plan) - low, 0)]
    if len(candidates) == 0:
        return len(plan)
    least = candidates[plan.reused_tokens[candidates] == plan.reused_tokens[candidates].min()]
    return int(least[np.abs(least - even).argmin()])


def planned(rows: IntArray, reused_tokens: IntArray) -> JobPlan:
    return JobPlan(rows, reused_tokens, np.array(_ends(reused_tokens.tolist()), np.int64))


def _ends(reused: Sequence[int]) -> list[int]:
    """Returns for each place the next one that reuses no more than it does; the number of places where there is none."""
    ends = [len(reused)] * len(reused)
    waiting: list[int] = []
    for place, n_reused in enumerate(reused):
        while waiting and reused[waiting[-1]] >= n_reused:
            ends[waiting.pop()] = place
        waiting.append(place)
    return ends
