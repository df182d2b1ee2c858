"""The plan of a whole job against brute force (BatchLLM, section 4.2)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch.single_level import Group, single_level_groups
from sgl_prefill.core.batch import batch_plan, prefix_order, row_tree
from sgl_prefill.core.batch.row_tree import ROOT, PrefixNode
from sgl_prefill.core.batch.token_rows import TokenRows
from sgl_prefill.core.policies.whole_job import OutputLength

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(ROWS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 12))
def test_rows_are_sorted_and_neighbours_compared_whatever_is_looked_at_together(
    rows: list[list[int]], fewest_columns: int, most_columns: int, n_rows: int
) -> None:
    at_once: dict[str, Any] = {"FEWEST_COLUMNS": fewest_columns, "MOST_COLUMNS": most_columns, "ROWS_AT_ONCE": n_rows}
    with mock.patch.multiple(prefix_order, **at_once):
        found = prefix_order.sort(TokenRows.of(rows))
    expected = sorted(range(len(rows)), key=rows.__getitem__)
    assert found.rows.tolist() == expected
    shared = [common(rows[one], rows[other]) for one, other in itertools.pairwise(expected)]
    assert found.shared_tokens.tolist() == [0] * (len(rows) > 0) + shared


def test_a_job_is_read_about_once_to_be_sorted() -> None:
    """Where each pass over all rows is one over a file larger than memory, a pass every few columns is hours."""
    pairs = [[7] * 1000 + [pair] * 1000 + [row] for pair in range(100) for row in (0, 1)]
    token_rows = TokenRows.of(pairs)
    with (
        mock.patch.object(prefix_order, "ROWS_AT_ONCE", 16),
        mock.patch.object(TokenRows, "columns", autospec=True, side_effect=TokenRows.columns) as columns,
    ):
        found = prefix_order.sort(token_rows)
    assert found.rows.tolist() == list(range(200))
    assert found.shared_tokens.tolist() == [0, 2000] + [1000, 2000] * 99
    n_read = sum(len(call.args[1]) * call.args[3] for call in columns.call_args_list)
    assert n_read < 1.1 * token_rows.lengths.sum()


@given(ROWS, st.integers(1, 3))
def test_what_neighbours_share_is_all_that_can_be_reused(rows: list[list[int]], page_size: int) -> None:
    """No order saves more: every whole page that several rows share is computed once, and each row's last token."""
    token_rows = TokenRows.of(rows)
    found = prefix_order.sort(token_rows).reusable_tokens(token_rows.lengths, page_size).sum()
    pages = {tuple(row[:end]) for row in rows for end in range(page_size, len(row) + 1, page_size)}
    n_pages = sum(len(row) // page_size for row in rows)
    # Of equal rows that consist of whole pages the last page of each is computed again.
    again = sum(len(row) % page_size == 0 for row in rows if row) - len(
        {tuple(row) for row in rows if row and len(row) % page_size == 0}
    )
    assert found == (n_pages - len(pages) - again) * page_size


def single_level(rows: list[list[int]]) -> tuple[list[PrefixNode], list[Group]]:
    token_rows = TokenRows.of(rows)
    shared = prefix_order.sort(token_rows).reusable_tokens(token_rows.lengths).tolist()
    nodes = row_tree.build(shared)
    groups = list(single_level_groups(nodes, len(rows)))
    assert sorted(row for group in groups for row in group.rows) == list(range(len(rows)))
    for group in groups:
        for one, other in itertools.pairwise(group.rows):
            assert min(shared[one + 1 : other + 1]) >= group.n_prefix_tokens
    return nodes, groups


def saved(groups: Sequence[Group]) -> int:
    return sum(group.saved_tokens for group in groups)


def best_of_all_choices(nodes: Sequence[PrefixNode], n_rows: int) -> int:
    """Tries every set of prefixes; each row belongs to the longest of its own."""
    best = 0
    for chosen in itertools.product((False, True), repeat=len(nodes)):
        owners = [ROOT] * n_rows
        for number, node in enumerate(nodes):
            if chosen[number]:
                owners[node.first : node.end] = [number] * node.n_rows
        used = set(owners) - {ROOT}
        best = max(best, sum(nodes[number].n_tokens * (owners.count(number) - 1) for number in used))
    return best


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=9), st.lists(st.integers(1, 6), min_size=6, max_size=6)
)
def test_no_choice_of_prefixes_saves_more_on_one_level(rows: list[list[int]], lengths: list[int]) -> None:
    long_rows = [[token for token, n in zip(row, lengths, strict=False) for _ in range(n)] for row in rows]
    nodes, groups = single_level(long_rows)
    assert saved(groups) == best_of_all_choices(nodes, len(rows))


def published(nodes: Sequence[PrefixNode], parent: int, depth: int) -> list[tuple[int, int]]:
    """Algorithm 1 as printed: (tokens beyond `depth`, rows) of each group below a node."""
    groups = []
    for number, node in enumerate(nodes):
        if node.parent != parent:
            continue
        n_tokens, n_left = node.n_tokens - depth, node.n_rows
        for n_below, n_rows in published(nodes, number, node.n_tokens):
            if (n_rows - 1) * n_below > n_tokens:
                groups.append((n_tokens + n_below, n_rows))
                n_left -= n_rows
        groups += [(n_tokens, n_left)] * (n_left > 0)
    return groups


def test_algorithm_1_charges_for_a_prefix_that_nobody_uses_any_more() -> None:
    """Two pairs share 3 tokens, and each 3 more: each fork alone gains nothing (3 > 3 is false), both together gain 3."""
    rows = [[0, 0, 0, 1, 1, 1, 5], [0, 0, 0, 1, 1, 1, 6], [0, 0, 0, 2, 2, 2, 5], [0, 0, 0, 2, 2, 2, 6]]
    nodes, groups = single_level(rows)
    assert sum(n_tokens * (n_rows - 1) for n_tokens, n_rows in published(nodes, ROOT, 0)) == 9
    assert saved(groups) == 12


def test_figure_4() -> None:
    """Six prompts: `b` is shared by five of them and saves 4 tokens; eight tokens shared by the fourth and fifth save 8."""
    b = [1]
    rows = [[0, 9], [*b, 2, 9], [*b, 3, 9], [*b, *range(10, 17), 4], [*b, *range(10, 17), 5], [*b, 6, 9]]
    nodes, groups = single_level(rows)
    first_level = [node for node in nodes if node.parent == ROOT]
    assert [(node.n_tokens, node.n_rows) for node in first_level] == [(1, 5)]
    assert sorted((group.n_prefix_tokens, len(group.rows)) for group in groups) == [(0, 1), (1, 3), (8, 2)]
    assert saved(groups) == 2 + 8


def test_rows_of_a_memory_mapped_file_are_read_where_they_lie(tmp_path: Path) -> None:
    tokens = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=5)
    tokens[:] = [7, 8, 9, 7, 8]
    found = prefix_order.sort(TokenRows.one_after_the_other(tokens, np.array([3, 2])))
    assert (found.rows.tolist(), found.shared_tokens.tolist()) == ([1, 0], [0, 2])


@given(ROWS, st.data())
def test_a_subset_is_planned_as_if_there_were_no_others(rows: list[list[int]], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True)) if rows else []
    part = batch_plan.depth_first(TokenRows.of(rows).subset(np.array(sorted(kept), np.int64)))
    alone = batch_plan.depth_first(TokenRows.of([rows[row] for row in sorted(kept)]))
    assert (part.rows.tolist(), part.reused_tokens.tolist()) == (alone.rows.tolist(), alone.reused_tokens.tolist())


@given(ROWS.filter(bool), st.integers(1, 4))
def test_shards_are_all_of_the_plan_and_nothing_twice(rows: list[list[int]], n_shards: int) -> None:
    token_rows = TokenRows.of(rows)
    whole = batch_plan.depth_first(token_rows)
    cuts = [batch_plan.shard(whole, token_rows.lengths, which, n_shards) for which in range(1, n_shards + 1)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(rows)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))


def test_a_job_is_cut_where_its_rows_share_nothing() -> None:
    """Twenty groups of five rows in four shards: an even cut lies within no group, since one that shares nothing is near."""
    rows = [[group] * 20 + [100 + row] for group in range(20) for row in range(5)]
    token_rows = TokenRows.of(rows)
    whole = batch_plan.depth_first(token_rows)
    cuts = [batch_plan.shard(whole, token_rows.lengths, which, 4) for which in (1, 2, 3, 4)]
    assert [whole.reused_tokens[first] for first, _ in cuts] == [0, 0, 0, 0]
    assert [end - first for first, end in cuts] == [25, 25, 25, 25]


@given(ROWS, st.integers(1, 3), st.data())
def test_another_order_of_siblings_saves_as_much(rows: list[list[int]], page_size: int, data: st.DataObject) -> None:
    token_rows = TokenRows.of(rows)
    outputs = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows))), np.int64)
    sorted_plan = batch_plan.depth_first(token_rows, page_size)
    found = batch_plan.decode_first(sorted_plan, token_rows.lengths, outputs, page_size)
    assert sorted(found.rows.tolist()) == list(range(len(rows)))
    for place, row in enumerate(found.rows.tolist()):
        before = [common(rows[row], rows[other]) for other in found.rows[:place].tolist()]
        most = min(max(before, default=0), max(len(rows[row]) - 1, 0)) // page_size * page_size
        assert found.reused_tokens[place] == most
    assert found.saved_tokens == sorted_plan.saved_tokens


def test_groups_that_write_most_for_what_they_read_come_first() -> None:
    rows = [[1, 1, 1, 1, group, row] for group, n_rows in ((2, 1), (3, 3), (4, 2)) for row in range(n_rows)]
    token_rows = TokenRows.of(rows)
    outputs = np.array([50, 10, 10, 10, 90, 10])
    found = batch_plan.decode_first(batch_plan.depth_first(token_rows), token_rows.lengths, outputs)
    assert [rows[row][4:] for row in found.rows.tolist()] == [[4, 0], [4, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert found.reused_tokens.tolist() == [0, 5, 4, 4, 5, 5]


def test_outputs_are_expected_to_be_as_long_as_those_before() -> None:
    length = OutputLength()
    assert length.share == 1.0
    for _ in range(96):
        length.observe(10, 100)
    assert length.share == pytest.approx((96 * 10 + 4 * 100) / (100 * 100))
