"""The forward pass over a split body: one layer's pieces chunk by chunk, then its attention over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch

from sgl_prefill.core.kv_plan import ceil_to
from sgl_prefill.hybrid.shared_rows import Exchange, SharedRows
from sgl_prefill.hybrid.split import Argument, Attention, BufferSpec, Piece, SplitBody

Value: TypeAlias = torch.Tensor | SharedRows  # of a buffer


class LayerIO(Protocol):
    """The engine's side of a forward pass, for one batch."""

    def write_kv(self, layer_id: int, start: int, end: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put K and V of the batch's tokens [start, end) into the KV pool. key, value: [end - start, heads, head_dim]."""
        ...

    def attend(self, layer_id: int, query: torch.Tensor, output: torch.Tensor, *, only_read_rows: bool = False) -> None:
        """Attention of all tokens of the batch, whose K and V are in the pool. query, output: [tokens, ...].

        only_read_rows: only the rows that `HybridBody.run` was told, [rows, ...].
        """
        ...


TILE_ROWS = 64  # of a matrix product; chunks are whole tiles


class HybridBody:
    """Runs a split body with at most `chunk_tokens` rows at a time."""

    def __init__(self, split: SplitBody, chunk_tokens: int, products: Sequence[Any] = ()) -> None:
        self.split = split
        self.chunk_tokens = chunk_tokens
        self.plain_tokens = 0  # extends of at most so many, and of at most one chunk, run in SGLang's own layers
        self.products = products  # `cpu.fused.Linear`, whose weights can be packed; none without native kernels
        # Whether those run here too.
        self.serves_short = bool(products)
        # Memory profiles set this: of the first two pieces and the last one only the first and the last chunk are
        # computed, in buffers that are all written once. All other layers do the same in the same buffers, so that a
        # pass over any length costs next to nothing and takes the memory of a whole one.
        self.only_what_decides_memory = False
        self.n_passes = 0  # that were sent here and not to SGLang's own layers
        # With several ranks: the buffers that they hold together, and how (`shared_rows`).
        self.shared: frozenset[int] = frozenset()
        self.exchange: Exchange | None = None
        self.on_written: Callable[[int, torch.Tensor], None] | None = (
            None  # called for each chunk that was written to a buffer
        )

    @property
    def retained_bytes_per_token(self) -> int:
        """Bytes per token in the full-length buffers, without K and V of one layer and the batch's indices."""
        n_ranks = 1 if self.exchange is None else self.exchange.count
        return sum(
            spec.row_bytes // (n_ranks if buffer in self.shared else 1)
            for buffer, spec in enumerate(self.split.buffers)
        )

    def run(
        self, token_rows: dict[str, torch.Tensor], io: LayerIO, read_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the hidden states after the body, [tokens, hidden size].

        token_rows: the inputs named in `trace.TOKEN_INPUTS`. read_rows: int64 [rows], the last tokens of each request,
        where no other hidden states are read: behind the last layer's K and V only these are computed; the others hold garbage.
        """
        n_tokens = token_rows["input_ids"].shape[0]
        is_one_chunk = n_tokens <= self.chunk_tokens and not self.only_what_decides_memory
        values: list[Value | None] = [None] * len(self.split.buffers)
        if not is_one_chunk:
            values = self._buffers(n_tokens, token_rows)
        n_whole = len(self.split.pieces) - (read_rows is not None)
        for index, piece in enumerate(self.split.pieces[:n_whole]):
            if self.only_what_decides_memory and 1 < index < len(self.split.pieces) - 1:
                continue
            attention = self.split.attentions[index] if index < len(self.split.attentions) else None
            if is_one_chunk:
                self._run_at_once(piece, attention, values, token_rows, io)
            else:
                assert _all_there(values)
                self._run_in_chunks(piece, attention, values, token_rows, io)
            if attention is not None and not (read_rows is not None and index == n_whole - 1):
                self._attend(attention, values, io, is_one_chunk=is_one_chunk)
        if read_rows is None:
            result = values[self.split.result]
            assert result is not None
            return result.whole() if isinstance(result, SharedRows) else result
        return self._only_read_rows(values, token_rows, io, read_rows)

    @staticmethod
    def _attend(attention: Attention, values: list[Value | None], io: LayerIO, *, is_one_chunk: bool) -> None:
        query = values[attention.query]
        assert isinstance(query, torch.Tensor)
        if is_one_chunk:
            values[attention.output] = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        output = values[attention.output]
        assert isinstance(output, torch.Tensor)
        io.attend(attention.layer_id, query, output)

    def _buffers(self, n_tokens: int, token_rows: dict[str, torch.Tensor]) -> list[Value | None]:
        """Allocates the full-length buffers of the values that cross a cut."""
        device = token_rows["input_ids"].device
        make = torch.zeros if self.only_what_decides_memory else torch.empty

        def made(buffer: int, spec: BufferSpec) -> Value:
            if buffer not in self.shared:
                return make((n_tokens, *spec.row_shape), dtype=spec.dtype, device=device)
            assert self.exchange is not None
            return SharedRows(spec, n_tokens, self._chunk_rows(n_tokens), self.exchange, make, device)

        return [made(buffer, spec) for buffer, spec in enumerate(self.split.buffers)]

    def _run_at_once(
        self,
        piece: Piece,
        attention: Attention | None,
        values: list[Value | None],
        token_rows: dict[str, torch.Tensor],
        io: LayerIO,
    ) -> None:
        """Runs a piece over all rows: its results are the values that cross, and none is copied."""
        n_tokens = token_rows["input_ids"].shape[0]
        results = self._run_chunk(piece, attention, values, token_rows, 0, n_tokens, io)
        for buffer, result in zip(piece.outputs, results, strict=True):
            if buffer is not None:
                values[buffer] = result

    def _run_in_chunks(
        self,
        piece: Piece,
        attention: Attention | None,
        buffers: list[Value],
        token_rows: dict[str, torch.Tensor],
        io: LayerIO,
    ) -> None:
        for start, end in self._chunks(token_rows["input_ids"].shape[0]):
            results = self._run_chunk(piece, attention, buffers, token_rows, start, end, io)
            if self.on_written is not None:
                for buffer, result in zip(piece.outputs, results, strict=True):
                    if buffer is not None:
                        self.on_written(buffer, result)
            self._store(piece, results, buffers, start, end)

    def _only_read_rows(
        self,
        values: list[Value | None],
        token_rows: dict[str, torch.Tensor],
        io: LayerIO,
        read_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the last attention and the last piece for these rows only."""
        attention, piece = self.split.attentions[-1], self.split.pieces[-1]
        read = {argument.buffer for argument in piece.arguments if argument.buffer is not None} | {attention.query}
        rows = [
            _select(value, read_rows) if value is not None and buffer in read else None
            for buffer, value in enumerate(values)
        ]
        query = rows[attention.query]
        assert query is not None
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        io.attend(attention.layer_id, query, output, only_read_rows=True)
        rows[attention.output] = output
        inputs = {name: value.index_select(0, read_rows) for name, value in token_rows.items()}
        results = self._run_chunk(piece, None, rows, inputs, 0, len(read_rows), io)
        scored = results[piece.outputs.index(self.split.result)]
        shape = (token_rows["input_ids"].shape[0], *scored.shape[1:])
        held = values[self.split.result]  # what it held has been read
        if isinstance(held, torch.Tensor) and held.shape == shape and held.is_contiguous():
            return held.index_copy_(0, read_rows, scored)
        values.clear()
        del held  # ranks hold it together: their parts make room for the whole
        return torch.empty(shape, dtype=scored.dtype, device=scored.device).index_copy_(0, read_rows, scored)

    def _chunks(self, n_tokens: int) -> list[tuple[int, int]]:
        n_rows = self._chunk_rows(n_tokens)
        chunks = [(start, min(start + n_rows, n_tokens)) for start in range(0, n_tokens, n_rows)]
        return [chunks[0], chunks[-1]] if self.only_what_decides_memory else chunks

    def _chunk_rows(self, n_tokens: int) -> int:
        """Rows of each chunk: as few chunks as possible, of equal length, since products of few rows waste a device."""
        if self.only_what_decides_memory:
            return self.chunk_tokens
        n_chunks = -(-n_tokens // self.chunk_tokens)
        return min(ceil_to(-(-n_tokens // n_chunks), TILE_ROWS), self.chunk_tokens)

    @staticmethod
    def _run_chunk(
        piece: Piece,
        attention: Attention | None,
        buffers: Sequence[Value | None],
        token_rows: dict[str, torch.Tensor],
        start: int,
        end: int,
        io: LayerIO,
    ) -> Sequence[torch.Tensor]:
        """Returns the results of the rows [start, end), whose K and V, the last two, go into the pool."""
        is_whole = end - start == token_rows["input_ids"].shape[0]

        def value_of(argument: Argument) -> Any:
            rows: Value | None = None
            if argument.buffer is not None:
                rows = buffers[argument.buffer]
                assert rows is not None
            elif argument.token_rows is not None:
                rows = token_rows[argument.token_rows]
            if isinstance(rows, SharedRows):
                return rows.read(start, end)
            if rows is not None:
                return rows if is_whole else rows[start:end]
            return end - start if argument.is_chunk_length else argument.constant

        results: Sequence[torch.Tensor] = piece.module(*map(value_of, piece.arguments))
        if attention is not None and attention.writes_kv:
            io.write_kv(attention.layer_id, start, end, *results[-2:])
        return results

    @staticmethod
    def _store(piece: Piece, results: Sequence[torch.Tensor], buffers: list[Value], start: int, end: int) -> None:
        """Copy a chunk's results to their buffers.

        A result may be a view of rows that another copy overwrites (a piece may pass an input on): it is copied first.
        The result of an in-place kernel is in its buffer already.
        """
        written = [buffers[buffer] for buffer in piece.outputs if buffer is not None]
        targets = {rows.untyped_storage().data_ptr() for rows in written if isinstance(rows, torch.Tensor)}
        pairs = []
        for buffer, result in zip(piece.outputs, results, strict=True):
            if buffer is None:
                continue
            target = buffers[buffer]
            if isinstance(target, SharedRows):
                target.write(start, result)
                continue
            rows = target[start:end]
            if result.data_ptr() == rows.data_ptr() and result.stride() == rows.stride():
                continue
            is_view_of_target = result.untyped_storage().data_ptr() in targets
            pairs.append((rows, result.clone() if is_view_of_target else result))
        for rows, result in pairs:
            rows.copy_(result)


def _select(value: Value, rows: torch.Tensor) -> torch.Tensor:
    return value.select(rows) if isinstance(value, SharedRows) else value.index_select(0, rows)


def _all_there(values: list[Value | None]) -> TypeGuard[list[Value]]:
    return all(value is not None for value in values)
