"""The global prefix tree of a job without a node per token (BatchLLM, section 4.2): rows are sorted, and neighbours compared.

In sorted order the rows that share a prefix are neighbours, and what a row shares with any row before it it shares with the
one directly before it. So two numbers a row stand for the whole tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefill.core.batch.token_rows import IntArray, TokenRows

# Rows of which a part is looked at together. Where more are alike, they are first divided by a few columns at a time, each a
# pass over all of them; so many are sorted to their ends at once, while the pages that hold them are in memory.
ROWS_AT_ONCE = 4096
FEWEST_COLUMNS, MOST_COLUMNS = 8, 1024
ALONE = -1


class PrefixOrder(NamedTuple):
    """All rows in lexicographic order."""

    rows: IntArray  # their numbers
    shared_tokens: IntArray  # that each has in common with the one before it; 0 of the first

    def reusable_tokens(self, lengths: IntArray, page_size: int = 1) -> IntArray:
        """Returns how many tokens of each row the prefix cache can hold if the rows run in this order and nothing is evicted:
        whole pages, and never the last token, whose logits are the answer."""
        most = np.maximum(lengths[self.rows] - 1, 0)
        reusable: IntArray = np.minimum(self.shared_tokens, most) // page_size * page_size
        return reusable


def sort(rows: TokenRows) -> PrefixOrder:
    """Sorts rows by their tokens; a row that begins another comes first, equal rows keep their order.

    Rows are read near each other and few times, since they may lie in a file that is larger than memory: what a large run of
    rows has in common is found by one pass and never sorted; a run that is small enough is sorted to its end.
    """
    order = np.arange(len(rows))
    shared = np.zeros(len(rows), np.int64)
    large = [(0, len(rows), 0)] if len(rows) > 1 else []  # first place, end, tokens that all of them share
    while large:
        first, end, start = large.pop()
        n_common = _n_common(rows, order[first:end], start)
        shared[first + 1 : end] += n_common
        start += n_common
        run_of = np.zeros(end - first, np.int64)
        run_of = _refine(rows, order, shared, np.arange(first, end), run_of, start, FEWEST_COLUMNS)
        start += FEWEST_COLUMNS
        is_first = np.diff(run_of, prepend=ALONE) != 0
        firsts = np.flatnonzero(is_first)
        sizes = np.diff(firsts, append=len(run_of)) if firsts.size else firsts
        goes_on = run_of[firsts] != ALONE
        firsts, sizes = first + firsts[goes_on], sizes[goes_on]
        is_large = sizes > ROWS_AT_ONCE
        large += [(begin, begin + n, start) for begin, n in zip(firsts[is_large], sizes[is_large], strict=True)]
        _sort_small(rows, order, shared, firsts[~is_large], sizes[~is_large], start)
    return PrefixOrder(order, shared)


def _n_common(rows: TokenRows, members: IntArray, start: int) -> int:
    """Counts the tokens from `start` on that all of these rows share."""
    expected = rows[members[0]][start:]
    n_common = len(expected)
    for begin in range(0, len(members), ROWS_AT_ONCE):
        some = members[begin : begin + ROWS_AT_ONCE]
        seen, n_columns = 0, FEWEST_COLUMNS
        while seen < n_common:
            n_columns = min(n_columns, n_common - seen)
            differs = (rows.columns(some, start + seen, n_columns) - 1 != expected[seen : seen + n_columns]).any(axis=0)
            if differs.any():
                n_common = seen + int(differs.argmax())
            seen += n_columns
            n_columns = min(2 * n_columns, MOST_COLUMNS)
    return n_common


def _sort_small(
    rows: TokenRows, order: IntArray, shared: IntArray, firsts: IntArray, sizes: IntArray, start: int
) -> None:
    """Sorts runs, which begin at these places and share `start` tokens each, to the ends of their rows, some at a time."""
    ends = np.cumsum(sizes)
    for batch in np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(ends // ROWS_AT_ONCE)) + 1):
        n_rows = sizes[batch]
        run_of = np.repeat(batch, n_rows)
        places = np.arange(len(run_of)) + np.repeat(firsts[batch] - (np.cumsum(n_rows) - n_rows), n_rows)
        seen, n_columns = start, FEWEST_COLUMNS
        while places.size:
            run_of = _refine(rows, order, shared, places, run_of, seen, n_columns)
            goes_on = run_of != ALONE
            places, run_of = places[goes_on], run_of[goes_on]
            seen += n_columns
            n_columns = min(2 * n_columns, MOST_COLUMNS)


def _refine(
    rows: TokenRows, order: IntArray, shared: IntArray, alike: IntArray, runs: IntArray, start: int, n_columns: int
) -> IntArray:
    """Sorts the rows of each run by their next columns, and adds to `shared` what neighbours have in common there.

    alike: places in the order. Returns their new runs.
    """
    block = rows.columns(order[alike], start, n_columns)
    is_first = np.empty(len(runs), bool)
    is_first[0], is_first[1:] = True, runs[1:] != runs[:-1]
    firsts = np.flatnonzero(is_first)
    run_numbers = np.cumsum(is_first) - 1
    differs = (block != block[firsts][run_numbers]).any(axis=1)
    must_sort = np.flatnonzero(np.logical_or.reduceat(differs, firsts)[run_numbers])
    if must_sort.size:
        # Big-endian bytes compare as the numbers do; the run's number before them keeps runs apart.
        keys = np.concatenate([run_numbers[must_sort, None], block[must_sort]], axis=1).astype(">u4")
        as_bytes = np.ascontiguousarray(keys).view(f"S{keys.shape[1] * 4}").ravel()
        sorted_places = must_sort[np.argsort(as_bytes, kind="stable")]
        block[must_sort] = block[sorted_places]
        order[alike[must_sort]] = order[alike[sorted_places]]
    differs_here = block[1:] != block[:-1]
    n_equal = np.where(differs_here.any(axis=1), differs_here.argmax(axis=1), n_columns)
    has_ended = (block == 0).any(axis=1)
    n_here = np.where(has_ended, (block == 0).argmax(axis=1), n_columns)  # tokens of each row in this block
    n_common = np.minimum(n_equal, n_here[1:])
    in_run = ~is_first[1:]
    shared[alike[1:][in_run]] += n_common[in_run]
    goes_on = in_run & (n_common == n_columns)
    joins = np.concatenate([[False], goes_on])  # is still equal to the one before it
    is_alone = ~joins & ~np.concatenate([goes_on, [False]])
    return np.where(is_alone, ALONE, np.cumsum(~joins))
