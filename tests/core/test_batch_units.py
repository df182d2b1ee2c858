"""A job divided among several engines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.batch.batch_plan import JobPlan, depth_first
from sgl_prefill.core.batch.token_rows import IntArray, TokenRows
from sgl_prefill.core.batch.units import FEWEST_UNITS, MOST_LOST, OF_ALL, Unit, divide, lost_tokens

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=40)


def groups(n_groups: int, n_rows: int, n_shared: int, n_own: int, n_common: int = 0) -> TokenRows:
    """Shuffled rows of groups; all rows begin with the same `n_common` tokens."""
    rows = [
        [1] * n_common + [10 + group] * n_shared + [1000 + row] * n_own
        for group in range(n_groups)
        for row in range(n_rows)
    ]
    random.Random(0).shuffle(rows)
    return TokenRows.of(rows)


def computed(plan: JobPlan, lengths: IntArray, unit: Unit) -> int:
    return int((lengths[plan.rows] - plan.reused_tokens)[unit.first : unit.end].sum())


@given(ROWS, st.integers(1, 4), st.integers(1, 9))
def test_units_are_all_of_the_plan_in_its_order(rows: list[list[int]], n_engines: int, most_rows: int) -> None:
    token_rows = TokenRows.of(rows)
    units = divide(depth_first(token_rows), token_rows.lengths, n_engines, most_rows)
    assert [place for unit in units for place in range(*unit)] == list(range(len(rows)))
    assert all(unit.first < unit.end for unit in units)


def test_no_group_is_torn_where_groups_are_smaller_than_units() -> None:
    rows = groups(200, 5, 60, 6)
    plan = depth_first(rows)
    units = divide(plan, rows.lengths, 2)
    assert {unit.first for unit in units} <= set(plan.group_begins().tolist())
    assert len(units) > 8


@pytest.mark.parametrize("n_engines", [1, 2, 8])
def test_the_last_units_are_small_so_that_engines_end_together(n_engines: int) -> None:
    """Whoever is the last at work has at most this part of its share left when the others have nothing more to do."""
    rows = groups(2000, 2, 10, 10)
    plan = depth_first(rows)
    sizes = [computed(plan, rows.lengths, unit) for unit in divide(plan, rows.lengths, n_engines)]
    total = sum(sizes)
    assert sizes[0] > 3 * sizes[-1]
    assert max(sizes[-n_engines:]) <= 1.2 * total * OF_ALL / n_engines
    assert len(sizes) <= 40 * n_engines


def test_a_group_that_is_larger_than_a_unit_is_torn_as_long_as_that_costs_little() -> None:
    rows = groups(1, 10_000, 100, 50)
    plan = depth_first(rows)
    units = divide(plan, rows.lengths, 4)
    assert len(units) >= 4 * FEWEST_UNITS
    assert max(unit.end - unit.first for unit in units) <= 4096


@pytest.mark.parametrize(("n_groups", "n_rows"), [(40, 25), (7, 300), (100, 12)])
def test_cuts_lose_little_of_what_is_shared(n_groups: int, n_rows: int) -> None:
    """A group's prefix is a hundred times as long as what is a row's own: a unit for every few rows would lose most of it."""
    rows = groups(n_groups, n_rows, 300, 3, n_common=50)
    plan = depth_first(rows)
    units = divide(plan, rows.lengths, 2)
    lost = lost_tokens(plan, [unit.first for unit in units[1:]])
    assert lost.sum() <= MOST_LOST * plan.saved_tokens
    assert len(units) >= 2 * FEWEST_UNITS


def test_what_all_rows_share_is_lost_to_no_cut() -> None:
    """Each engine computes it once, with its first unit, which is not smaller for that."""
    rows = groups(50, 4, 10, 10, n_common=1000)
    plan = depth_first(rows)
    units = divide(plan, rows.lengths, 2)
    assert lost_tokens(plan, [unit.first for unit in units[1:]]).max() <= 10
    assert len(units) > 8
    assert units[0].end - units[0].first > 20
