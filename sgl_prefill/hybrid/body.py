"""The forward pass over a split body: one layer's pieces chunk by chunk, then its attention over everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sgl_prefill.hybrid.split import Argument, Piece, SplitBody


class LayerIO(Protocol):
    """What a forward pass needs of the engine, for the batch that runs."""

    def write_kv(self, layer_id: int, start: int, end: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put K and V of the batch's tokens [start, end) into the KV pool. key, value: [end - start, heads, head_dim]."""
        ...

    def attend(self, layer_id: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of all of the batch's tokens, K and V being in the pool. query, output: [tokens, ...]."""
        ...


class HybridBody:
    """Runs a split body with `chunk_tokens` rows at a time."""

    def __init__(self, split: SplitBody, chunk_tokens: int) -> None:
        self.split = split
        self.chunk_tokens = chunk_tokens
        # Memory profiles set this: of the first two pieces and the last one only the first and the last chunk are
        # computed, in buffers that are all written once. All other layers do the same in the same buffers, so that a
        # pass over any length costs next to nothing and takes the memory of a whole one.
        self.only_what_decides_memory = False

    @property
    def retained_bytes_per_token(self) -> int:
        """Of the full-length buffers; K and V of one layer and the batch's own indices come on top."""
        return sum(spec.row_bytes for spec in self.split.buffers)

    def run(self, token_rows: dict[str, torch.Tensor], io: LayerIO) -> torch.Tensor:
        """Hidden states after the body, [tokens, hidden size]. `token_rows`: the inputs named in `trace.TOKEN_INPUTS`."""
        n_tokens = token_rows["input_ids"].shape[0]
        device = token_rows["input_ids"].device
        buffers = [
            torch.empty((n_tokens, *spec.row_shape), dtype=spec.dtype, device=device) for spec in self.split.buffers
        ]
        if self.only_what_decides_memory:
            for buffer in buffers:
                buffer.zero_()
        for index, piece in enumerate(self.split.pieces):
            if self.only_what_decides_memory and 1 < index < len(self.split.pieces) - 1:
                continue
            attention = self.split.attentions[index] if index < len(self.split.attentions) else None
            for start, end in self._chunks(n_tokens):
                results = self._run_chunk(piece, buffers, token_rows, start, end)
                if attention is not None and attention.writes_kv:
                    io.write_kv(attention.layer_id, start, end, *results[-2:])
                self._store(piece, results, buffers, start, end)
            if attention is not None:
                io.attend(attention.layer_id, buffers[attention.query], buffers[attention.output])
        return buffers[self.split.result]

    def _chunks(self, n_tokens: int) -> list[tuple[int, int]]:
        starts = range(0, n_tokens, self.chunk_tokens)
        chunks = [(start, min(start + self.chunk_tokens, n_tokens)) for start in starts]
        return [chunks[0], chunks[-1]] if self.only_what_decides_memory else chunks

    @staticmethod
    def _run_chunk(
        piece: Piece, buffers: list[torch.Tensor], token_rows: dict[str, torch.Tensor], start: int, end: int
    ) -> Sequence[torch.Tensor]:
        def value_of(argument: Argument) -> Any:
            if argument.buffer is not None:
                return buffers[argument.buffer][start:end]
            if argument.token_rows is not None:
                return token_rows[argument.token_rows][start:end]
            return end - start if argument.is_chunk_length else argument.constant

        results: Sequence[torch.Tensor] = piece.module(*map(value_of, piece.arguments))
        return results

    @staticmethod
    def _store(
        piece: Piece, results: Sequence[torch.Tensor], buffers: list[torch.Tensor], start: int, end: int
    ) -> None:
        """Copy a chunk's results to their buffers.

        A result may be a view of rows that another copy overwrites (a piece may pass an input on): it is copied first.
        A kernel that works in place leaves its result where it belongs already.
        """
        targets = {buffers[buffer].untyped_storage().data_ptr() for buffer in piece.outputs if buffer is not None}
        pairs = []
        for buffer, result in zip(piece.outputs, results, strict=True):
            if buffer is None:
                continue
            rows = buffers[buffer][start:end]
            if result.data_ptr() == rows.data_ptr() and result.stride() == rows.stride():
                continue
            is_view_of_target = result.untyped_storage().data_ptr() in targets
            pairs.append((rows, result.clone() if is_view_of_target else result))
        for rows, result in pairs:
            rows.copy_(result)
