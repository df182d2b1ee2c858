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
        tokens: all rows, one after the other.
        offsets: where each row begins in `tokens`, and where the last one ends: one more than there are rows.
    """

    def __init__(self, tokens: IntArray, offsets: IntArray) -> None:
        assert offsets[-1] <= len(tokens), (offsets[-1], len(tokens))
        self.tokens, self.offsets = tokens, offsets

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> TokenRows:
        """Copies rows that are in memory."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        offsets = np.cumsum([0, *(len(row) for row in arrays)], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.empty(0, np.int32), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> IntArray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> IntArray:
        """Returns the tokens of each row."""
        return np.diff(self.offsets)

    def columns(self, rows: IntArray, start: int, n_tokens: int) -> IntArray:
        """Returns tokens `start` to `start + n_tokens` of some rows, each larger by one: 0 stands for what lies beyond the end
        of a row. Shape (len(rows), n_tokens), int32."""
        positions = np.arange(start, start + n_tokens)
        begins, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        is_there = positions < lengths[:, None]
        if len(self.tokens) == 0:
            return np.zeros(is_there.shape, np.int32)
        found = self.tokens[np.where(is_there, begins[:, None] + positions, 0)]
        return np.where(is_there, found + 1, 0).astype(np.int32)
