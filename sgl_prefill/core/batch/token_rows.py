"""The prompts of a whole job: one array of tokens, which may lie in a memory-mapped file, and where each row begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[Any]  # of any integer type


class TokenRows:
    """Rows of token ids, all >= 0.

    Args:
        tokens: all rows.
        begins: where each row begins in `tokens`.
        lengths: tokens of each row.
    """

    def __init__(self, tokens: IntArray, begins: IntArray, lengths: IntArray) -> None:
        self.tokens, self.begins, self.lengths = tokens, begins, lengths

    @classmethod
    def one_after_the_other(cls, tokens: IntArray, lengths: IntArray) -> TokenRows:
        """Makes the rows of an array that holds nothing else."""
        ends = np.cumsum(lengths, dtype=np.int64)
        assert len(tokens) >= (ends[-1] if len(ends) else 0), (len(tokens), ends[-1:])
        return cls(tokens, ends - lengths, lengths)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | IntArray]) -> TokenRows:
        """Copies rows that are in memory."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        lengths = np.array([len(row) for row in arrays], dtype=np.int64)
        return cls.one_after_the_other(np.concatenate(arrays) if arrays else np.empty(0, np.int32), lengths)

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, row: int) -> IntArray:
        return self.tokens[self.begins[row] : self.begins[row] + self.lengths[row]]

    def subset(self, rows: IntArray) -> TokenRows:
        """Returns some of the rows, without their tokens being copied."""
        return TokenRows(self.tokens, self.begins[rows], self.lengths[rows])

    def columns(self, rows: IntArray, start: int, n_tokens: int) -> IntArray:
        """Returns tokens `start` to `start + n_tokens` of some rows, each larger by one: 0 stands for what lies beyond the end
        of a row. Shape (len(rows), n_tokens), int32."""
        positions = np.arange(start, start + n_tokens)
        is_there = positions < self.lengths[rows][:, None]
        if len(self.tokens) == 0:
            return np.zeros(is_there.shape, np.int32)
        found = self.tokens[np.where(is_there, self.begins[rows][:, None] + positions, 0)]
        return np.where(is_there, found.astype(np.int32) + 1, 0)
