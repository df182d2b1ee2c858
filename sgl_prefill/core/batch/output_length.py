"""How long the outputs of a job's rows will be, learned from those that have been written (BatchLLM, section 4.3.2: the
lengths of one task's outputs lie close together, and nobody knows them before)."""

from __future__ import annotations

# At the beginning each row is expected to write all that it may; so many rows outweigh that.
BELIEVED_ROWS = 4


class OutputLength:
    """The share of what they may write that rows do write."""

    def __init__(self) -> None:
        self._n_written = self._n_allowed = self._n_believed = 0.0

    def observe(self, n_written: int, n_allowed: int) -> None:
        """Hears that a row has ended. All in tokens."""
        if not self._n_allowed:
            self._n_believed = float(BELIEVED_ROWS * n_allowed)
        self._n_written += n_written
        self._n_allowed += n_allowed

    @property
    def share(self) -> float:
        """Returns what a row is expected to write of what it may; 1 while nothing is known."""
        n_allowed = self._n_allowed + self._n_believed
        return (self._n_written + self._n_believed) / n_allowed if n_allowed else 1.0
