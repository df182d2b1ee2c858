"""In which order the columns of each row of a table stand in its prompt, so that rows share longer prefixes.

Greedy group recursion (GGR; Liu et al., Optimizing LLM Queries in Relational Data Analytics Workloads, MLSys 2025): of all values
of all columns, the one that saves most stands first in all rows that have it; so on among these rows with the other columns,
and among the other rows with all. What a value saves here is its length for each row but the first, and not its square.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sgl_prefill.core.batch.token_rows import IntArray


def column_orders(values: IntArray, lengths: Sequence[IntArray]) -> IntArray:
    """Returns for each row the columns in their order: shape (rows, columns).

    Args:
        values: which value each row has in each column, as numbers from 0 on for each column; shape (rows, columns).
        lengths: of each column, how long each value is.
    """
    n_rows, n_columns = values.shape
    orders = np.empty((n_rows, n_columns), np.int64)
    todo: list[tuple[IntArray, tuple[int, ...], tuple[int, ...]]] = [
        (np.arange(n_rows), (), tuple(range(n_columns)))
    ]  # rows, columns that stand before, and those that are left
    while todo:
        rows, before, left = todo.pop()
        rest = np.ones(len(rows), bool)
        for column, members in _groups(values[rows], left, lengths):
            rest[members] = False
            todo.append((rows[members], (*before, column), tuple(other for other in left if other != column)))
        orders[rows[rest]] = (*before, *left)
    return orders


def _groups(values: IntArray, columns: Sequence[int], lengths: Sequence[IntArray]) -> list[tuple[int, IntArray]]:
    """Returns groups of rows that have one value of a column in common, each row in one at most, the best group first."""
    members: dict[tuple[int, int], IntArray] = {}
    gains: list[tuple[int, int, int]] = []  # (minus what it saves, column, value)
    for column in columns:
        order = np.argsort(values[:, column], kind="stable")
        found, begins, counts = np.unique(values[order, column], return_index=True, return_counts=True)
        for value, begin, count in zip(found.tolist(), begins.tolist(), counts.tolist(), strict=True):
            if gain := int(lengths[column][value]) * (count - 1):
                members[column, value] = order[begin : begin + count]
                gains.append((-gain, column, value))
    heapq.heapify(gains)
    is_left = np.ones(len(values), bool)
    groups = []
    while gains:
        gain, column, value = heapq.heappop(gains)
        rows = members[column, value]
        rows = members[column, value] = rows[is_left[rows]]
        now = int(lengths[column][value]) * max(len(rows) - 1, 0)
        if now == 0:
            continue
        if now < -gain:  # some of its rows belong to a better group
            heapq.heappush(gains, (-now, column, value))
            continue
        is_left[rows] = False
        groups.append((column, rows))
    return groups


def saved(values: IntArray, lengths: Sequence[IntArray], orders: IntArray) -> int:
    """Counts what rows share with those before them, in units of `lengths`, if their columns stand in these orders and the rows
    are sorted."""
    n_rows, n_columns = values.shape
    if n_rows < 2:
        return 0
    first_of = np.cumsum([0, *(len(of_column) for of_column in lengths)])
    in_order = np.take_along_axis(values, orders, axis=1) + first_of[orders]
    of_cells = np.take_along_axis(
        np.stack([lengths[column][values[:, column]] for column in range(n_columns)], axis=1), orders, axis=1
    )
    places = np.lexsort(in_order.T[::-1])
    is_same = in_order[places][1:] == in_order[places][:-1]
    is_shared = np.logical_and.accumulate(is_same, axis=1)
    return int((of_cells[places][1:] * is_shared).sum())
