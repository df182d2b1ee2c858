"""The global prefix tree of a job without a node per token (BatchLLM, section 4.2): rows are sorted, and neighbours compared.

In sorted order the rows that share a prefix are neighbours, and what a row shares with any row before it it shares with the
one directly before it. So two numbers a row stand for the whole tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefill.core.batch.token_rows import IntArray, TokenRows

# Tokens that are looked at together: rows that are still alike, times columns. Bounds the memory beside the rows themselves.
MOST_TOKENS_AT_ONCE = 1 << 23
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

    Columns are looked at in blocks, and only of rows that are still equal to a neighbour; where a whole run of rows goes on
    alike, nothing is sorted. So long shared prefixes cost one comparison a token.
    """
    order = np.arange(len(rows))
    shared = np.zeros(len(rows), np.int64)
    run_of = np.zeros(len(rows), np.int64)  # rows with one number have been equal so far
    if len(rows) < 2:
        return PrefixOrder(order, shared)
    start = 0
    while (alike := np.flatnonzero(run_of != ALONE)).size:
        n_columns = min(max(MOST_TOKENS_AT_ONCE // alike.size, FEWEST_COLUMNS), MOST_COLUMNS)
        run_of[alike] = _refine(rows, order, shared, alike, run_of[alike], start, n_columns)
        start += n_columns
    return PrefixOrder(order, shared)


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
