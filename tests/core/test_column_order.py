"""The order of a table's columns, row by row (GGR)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefill.core.batch.column_order import column_orders, saved

TABLES = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=8)


def shared(rows: Sequence[list[tuple[int, int]]], lengths: Sequence[Sequence[int]]) -> int:
    """What sorted rows share with the one before, in units of length; cells are (column, value)."""
    total = 0
    for one, other in itertools.pairwise(sorted(rows)):
        for cell, same in zip(one, other, strict=True):
            if cell != same:
                break
            total += lengths[cell[0]][cell[1]]
    return total


def ordered(table: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    orders = column_orders(np.array(table), [np.array(of_column) for of_column in lengths])
    return [[(column, row[column]) for column in order] for row, order in zip(table, orders.tolist(), strict=True)]


@given(TABLES)
def test_every_row_keeps_all_its_columns(table: list[tuple[int, ...]]) -> None:
    orders = column_orders(np.array(table), [np.array([3, 1, 2])] * 3)
    assert np.sort(orders, axis=1).tolist() == [[0, 1, 2]] * len(table)


def test_a_column_that_says_the_same_everywhere_stands_first() -> None:
    table = [[row, 0] for row in range(5)]
    lengths = [[4] * 5, [3]]
    assert shared(ordered(table, lengths), lengths) == 4 * 3


def test_rows_are_ordered_each_by_what_it_shares() -> None:
    """Half of the rows share their first column, the others their second: no order of all rows saves both."""
    table = [[0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [3, 0]]
    lengths = [[5, 5, 5, 5], [5, 5, 5, 5]]
    assert shared(ordered(table, lengths), lengths) == 2 * 5 + 2 * 5
    fixed = [max(shared([[(c, row[c]) for c in order] for row in table], lengths) for order in ((0, 1), (1, 0)))]
    assert fixed == [10]


def test_among_the_rows_of_a_group_it_goes_on_with_the_other_columns() -> None:
    table = [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 1, 4]]
    lengths = [[10], [2, 2], [9] * 5]
    assert shared(ordered(table, lengths), lengths) == 3 * 10 + 2 * 2


def test_a_long_value_that_few_share_stands_before_a_short_one_that_many_do() -> None:
    table = [[0, 0], [0, 0], [0, 1], [0, 2]]
    lengths = [[1], [50, 50, 50]]
    assert shared(ordered(table, lengths), lengths) == 50 + 1 + 1


def test_a_table_without_rows_or_with_one_column_is_left_as_it_is() -> None:
    assert column_orders(np.empty((0, 2), np.int64), [np.array([1]), np.array([1])]).shape == (0, 2)
    assert column_orders(np.array([[0], [0]]), [np.array([1])]).tolist() == [[0], [0]]


@given(TABLES, st.integers(0, 1))
def test_what_an_order_saves_is_counted(table: list[tuple[int, ...]], reverses: int) -> None:
    lengths = [[3, 1, 2], [5, 5, 5], [1, 8, 2]]
    arrays = [np.array(of_column) for of_column in lengths]
    order = (2, 1, 0) if reverses else (0, 1, 2)
    rows = [[(column, row[column]) for column in order] for row in table]
    assert saved(np.array(table), arrays, np.array([order] * len(table))) == shared(rows, lengths)
