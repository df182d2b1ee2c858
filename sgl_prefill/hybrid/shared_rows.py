"""Full-length values divided over the ranks of an engine (an addition to the paper, where each device holds all rows).

With tensor parallelism the residual stream is the same on every rank: each rank keeps its part of the
rows of a chunk, and a chunk is gathered when it is read. Queries and attention outputs differ per rank and are not divided.

    chunk of 6 tokens, 2 ranks:   rank 0 keeps rows 0 1 2, rank 1 keeps rows 3 4 5
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from sgl_prefill.core.ranks import Ranks

if TYPE_CHECKING:
    from sgl_prefill.hybrid.body import HybridBody
    from sgl_prefill.hybrid.split import BufferSpec


class Exchange(Protocol):
    """Collective operations; all ranks call the same ones in the same order."""

    index: int
    count: int

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the parts of all ranks, one after the other: [count * rows, ...]."""
        ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, possibly in place."""
        ...


class SharedRows:
    """One value of full length, [tokens, ...], in chunks of `chunk_tokens`."""

    def __init__(
        self,
        spec: BufferSpec,
        n_tokens: int,
        chunk_tokens: int,
        exchange: Exchange,
        make: Callable[..., torch.Tensor],
        device: torch.device,
    ) -> None:
        self._exchange, self._n_tokens, self._chunk_tokens = exchange, n_tokens, chunk_tokens
        self._part = -(-chunk_tokens // exchange.count)
        n_rows = -(-n_tokens // chunk_tokens) * self._part
        self._own = make((n_rows, *spec.row_shape), dtype=spec.dtype, device=device)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Returns the rows of one chunk, which begins at `start`, as a tensor of its own."""
        first = start // self._chunk_tokens * self._part
        return self._exchange.gather(self._own[first : first + self._part])[: end - start]

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Keeps this rank's part of the rows of one chunk, which begins at `start`."""
        first = start // self._chunk_tokens * self._part
        mine = rows[self._exchange.index * self._part : (self._exchange.index + 1) * self._part]
        self._own[first : first + len(mine)] = mine

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows by index, int64 [rows], as a sum over ranks."""
        of_chunk = rows % self._chunk_tokens
        own = self._own[rows // self._chunk_tokens * self._part + of_chunk % self._part]
        is_mine = (of_chunk // self._part == self._exchange.index).view(-1, *[1] * (own.dim() - 1))
        return self._exchange.sum(torch.where(is_mine, own, torch.zeros_like(own)))

    def whole(self) -> torch.Tensor:
        """Returns all rows."""
        starts = range(0, self._n_tokens, self._chunk_tokens)
        return torch.cat([self.read(start, min(start + self._chunk_tokens, self._n_tokens)) for start in starts])


def share_equal_buffers(hybrid: HybridBody, run: Callable[[], None], ranks: Ranks, exchange: Exchange) -> None:
    """Finds the buffers whose values are equal on all ranks whenever they are written, and divides these over the ranks.

    run: runs a prompt of several chunks. The parity gate, which runs another prompt, would catch a value that is equal by chance.
    """
    own = {buffer for attention in hybrid.split.attentions for buffer in (attention.query, attention.output)}
    written: dict[int, list[str]] = {}
    with _watched(hybrid, lambda buffer, rows: written.setdefault(buffer, []).append(_digest(rows))):
        run()
    from_ranks = ranks.of_all(written)
    equal = {
        buffer for buffer in written if all(other.get(buffer) == from_ranks[0].get(buffer) for other in from_ranks)
    }
    hybrid.shared, hybrid.exchange = frozenset(equal - own), exchange


@contextmanager
def _watched(hybrid: HybridBody, watch: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    hybrid.on_written = watch
    try:
        yield
    finally:
        hybrid.on_written = None


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
