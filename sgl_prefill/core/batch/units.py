"""A job divided among several engines: pieces of its plan that share little with each other, the larger ones first.

A free engine takes the next piece. What a piece shares with the one before it is computed again where another engine takes it,
but for what all rows share: each engine computes that once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefill.core.batch.batch_plan import JobPlan, cheapest_cut
from sgl_prefill.core.batch.token_rows import IntArray

# A piece is this part of what is left for one engine, and the last ones this part of what one engine does in all: so the engines
# end together although the time of a row is not known.
OF_WHAT_IS_LEFT, OF_ALL = 1 / 4, 1 / 32
# What the death of an engine costs at most; answered in a second by the fastest.
MOST_ROWS = 4096
# Of what a plan saves so much may be lost to cuts, as long as each engine gets two pieces.
MOST_LOST = 0.005
FEWEST_UNITS = 2  # for each engine


class Unit(NamedTuple):
    """A piece of a plan, from one place to before another."""

    first: int
    end: int


def divide(plan: JobPlan, lengths: IntArray, n_engines: int, most_rows: int = MOST_ROWS) -> list[Unit]:
    """Returns the pieces, in the order of the plan.

    Args:
        lengths: tokens of each row, by its number.
        most_rows: of a piece, unless cuts would cost too much.
    """
    if len(plan) == 0:
        return []
    n_computed = lengths[plan.rows] - plan.reused_tokens
    n_computed[0] -= min(_n_common(plan), n_computed[0])  # every engine computes it, whatever it is given
    cuts = _even_cuts(plan, np.cumsum(np.maximum(n_computed, 1)), n_engines, most_rows)
    cuts = _without_dear(cuts, lost_tokens(plan, cuts), MOST_LOST * plan.saved_tokens, FEWEST_UNITS * n_engines)
    return [Unit(first, end) for first, end in zip([0, *cuts], [*cuts, len(plan)], strict=True)]


def lost_tokens(plan: JobPlan, cuts: list[int]) -> IntArray:
    """Returns how many tokens are computed again at each cut at most, where what all rows share is at hand."""
    lost: IntArray = plan.reused_tokens[np.array(cuts, np.int64)] - _n_common(plan)
    return lost


def _n_common(plan: JobPlan) -> int:
    """Counts the tokens that all rows begin with."""
    return int(plan.reused_tokens[1:].min()) if len(plan) > 1 else 0


def _even_cuts(plan: JobPlan, computed: IntArray, n_engines: int, most_rows: int) -> list[int]:
    total = float(computed[-1])
    cuts: list[int] = []
    first = 0
    while True:
        done = float(computed[first - 1]) if first else 0.0
        size = max((total - done) * OF_WHAT_IS_LEFT, total * OF_ALL) / n_engines
        if first + most_rows < len(plan):
            size = min(size, float(computed[first + most_rows - 1]) - done)
        cut = max(cheapest_cut(plan, computed, done + size, size / 10, first), first + 1)
        cut = min(cut, first + most_rows)
        if cut >= len(plan):
            return cuts
        cuts.append(cut)
        first = cut


def _without_dear(cuts: list[int], lost: IntArray, most_lost: float, fewest_units: int) -> list[int]:
    """Leaves out the cuts that cost most until the others cost little enough."""
    dearest_last = np.argsort(lost, kind="stable")
    n_kept = int((np.cumsum(lost[dearest_last]) <= most_lost).sum())
    n_kept = min(max(n_kept, fewest_units - 1), len(cuts))
    return sorted(cuts[which] for which in dearest_last[:n_kept].tolist())
