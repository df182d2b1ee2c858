"""Attention of one request on a CPU with PyTorch's kernels; imports nothing of SGLang.

A request's queries are the last `n_q` of its `n_kv` positions. They are processed in blocks, and the keys of a block in
tiles; only the tile on the diagonal is causal:

    keys:      0 ...... tile | ...... tile | ... offset + s | offset + s ........ offset + e
    queries:   the block [s, e) sees all of these, unmasked | query i up to key offset + i

PyTorch's CPU flash kernel computes each tile, and the results are merged exactly by their log-sum-exp. Work is
O(n_q x n_kv), there are no masks or padded queries, memory beyond the output is one block and one tile, and the output may
overwrite the queries. The kernel supports grouped query heads without repeating K, V.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Blocks of 1,024 queries and tiles of 8,192 keys are 0 to 3 % slower than one call over everything (12,000 tokens).
QUERY_BLOCK_TOKENS = 1024
KEY_TILE_TOKENS = 8192
# From this many queries on, K and V are first copied to contiguous rows per head. The kernel reads them once per 256 queries,
# and is 10 % faster this way (12,000 tokens, 4 KV heads of 64), far more than the copy costs.
PACK_FROM_QUERIES = 1024
# Queries per block with a mask or a score matrix. Larger blocks waste work on keys outside the window.
WINDOW_BLOCK_TOKENS = 512
SOFT_CAP_BLOCK_TOKENS = 128
# Shorter runs of consecutive KV slots are gathered together with their neighbours.
MIN_RUN_TOKENS = 64


class Run(NamedTuple):
    """Positions [start, end) of one request."""

    start: int
    end: int
    slots: slice | torch.Tensor  # KV slots of these positions; a slice of consecutive ones avoids a copy


def runs_of(slots: torch.Tensor) -> list[Run]:
    """Splits the KV slots of a request, [n] in position order, into as few runs as possible."""
    n = slots.shape[0]
    breaks = (torch.nonzero(slots[1:] - slots[:-1] != 1).flatten() + 1).tolist()
    bounds = [0, *breaks, n]
    runs: list[Run] = []
    scattered_from = 0
    for start, end in itertools.pairwise(bounds):
        if end - start < MIN_RUN_TOKENS and len(bounds) > 2:
            continue
        if scattered_from < start:
            runs.append(Run(scattered_from, start, slots[scattered_from:start].to(torch.int64)))
        first = int(slots[start])
        runs.append(Run(start, end, slice(first, first + end - start)))
        scattered_from = end
    if scattered_from < n:
        runs.append(Run(scattered_from, n, slots[scattered_from:].to(torch.int64)))
    return runs


class KVRows(NamedTuple):
    """K and V of one request in one layer, in the KV pool."""

    key_pool: torch.Tensor  # [slots, kv heads, head_dim], any strides
    value_pool: torch.Tensor
    runs: list[Run]

    @property
    def n_tokens(self) -> int:
        return self.runs[-1].end

    def between(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (key, value) of positions [start, end): views within one run of consecutive slots, else copies."""

        def read(pool: torch.Tensor) -> torch.Tensor:
            parts = []
            for run in self.runs:
                first, last = max(start, run.start) - run.start, min(end, run.end) - run.start
                if first >= last:
                    continue
                if isinstance(run.slots, slice):
                    parts.append(pool[run.slots.start + first : run.slots.start + last])
                else:
                    parts.append(pool.index_select(0, run.slots[first:last]))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return read(self.key_pool), read(self.value_pool)

    def tiles(self, end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (key, value) of positions [0, end) in tiles; no tile spans two runs."""
        for run in self.runs:
            for start in range(run.start, min(run.end, end), KEY_TILE_TOKENS):
                yield self.between(start, min(start + KEY_TILE_TOKENS, run.end, end))


def attend(
    query: torch.Tensor,
    rows: KVRows,
    output: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window_tokens: int | None = None,
    soft_cap: float = 0.0,
    only_last_block: bool = False,
) -> None:
    """Computes the attention of one request.

    Args:
        query: [n_q, query heads, head_dim], the last n_q positions of the request.
        rows: K and V of the request, n_kv >= n_q positions; kv heads divide query heads.
        output: [n_q, query heads, head_dim], written; may be `query` itself.
        scale: factor on the dot products.
        causal: if False, every query sees every key.
        window_tokens: a query at position p sees keys p - window_tokens to p, both included (SGLang's convention). None: no
            window.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: unchanged.
        only_last_block: computes and writes only the last block of queries, which needs the most memory; for memory profiles.
    """
    n_q, n_kv = query.shape[0], rows.n_tokens
    assert n_q <= n_kv, (n_q, n_kv)
    if window_tokens is not None and (not causal or window_tokens >= n_kv - 1):
        window_tokens = None
    block_tokens = QUERY_BLOCK_TOKENS if window_tokens is None else WINDOW_BLOCK_TOKENS
    size = SOFT_CAP_BLOCK_TOKENS if soft_cap > 0.0 else block_tokens
    for start in range(max(n_q - size, 0) if only_last_block else 0, n_q, size):
        end = min(start + size, n_q)
        block, positions = query[start:end], range(n_kv - n_q + start, n_kv - n_q + end)
        if soft_cap > 0.0:
            result = _soft_capped_block(block, rows, positions, scale, causal, window_tokens, soft_cap)
        elif window_tokens is not None:
            result = _windowed_block(block, rows, positions, scale, window_tokens)
        else:
            result = _plain_block(block, rows, positions, scale, causal)
        output[start:end] = result
        del result  # frees its memory before the next block


def _plain_block(block: torch.Tensor, rows: KVRows, positions: range, scale: float, causal: bool) -> torch.Tensor:
    """Merges the causal tile on the diagonal with the tiles that all queries of the block see."""
    is_triangle = causal and len(positions) > 1
    merged = None
    if is_triangle:
        merged = _run_flash(block, *rows.between(positions.start, positions.stop), scale, is_causal=True)
    n_seen_by_all = positions.start if is_triangle else rows.n_tokens if not causal else positions.stop
    for key, value in rows.tiles(n_seen_by_all):
        part = _run_flash(block, key, value, scale)
        merged = part if merged is None else merge_by_log_sum_exp(*part, *merged)
    assert merged is not None
    return merged[0]


def merge_by_log_sum_exp(
    left: torch.Tensor, left_lse: torch.Tensor, right: torch.Tensor, right_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention over two disjoint sets of keys. Returns (result in float32, its log-sum-exp).

    left, right: [n_q, heads, head_dim], a float32 `left` is overwritten; *_lse: [n_q, heads], natural logarithm of the
    softmax denominators. The right side's share is exp(r) / (exp(l) + exp(r)) = sigmoid(r - l), which cannot overflow.
    """
    right_share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1)
    return left.float().lerp_(right.float(), right_share), torch.logaddexp(left_lse, right_lse)


def _run_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (output [n_q, heads, head_dim], log-sum-exp [n_q, heads]) of the flash kernel, which takes [1, heads, n, dim]."""
    key, value = key.to(query.dtype).transpose(0, 1), value.to(query.dtype).transpose(0, 1)
    if query.shape[0] >= PACK_FROM_QUERIES:
        key, value = key.contiguous(), value.contiguous()
    output, lse = _flash(
        query.transpose(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        is_causal=is_causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _windowed_block(
    block: torch.Tensor, rows: KVRows, positions: range, scale: float, window_tokens: int
) -> torch.Tensor:
    """Attention in a sliding window: a block reads its own keys and one window before them, so work is O(n_q x window)."""
    first_key = max(0, positions.start - window_tokens)
    visible = _visible(positions, range(first_key, positions.stop), window_tokens)
    mask = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -torch.inf)
    key, value = rows.between(first_key, positions.stop)
    return _run_flash(block, key, value, scale, mask=mask)[0]


def _soft_capped_block(
    block: torch.Tensor,
    rows: KVRows,
    positions: range,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with soft-capped scores, which the flash kernel lacks: a float32 score matrix of one query block."""
    first_key = 0 if window_tokens is None else max(0, positions.start - window_tokens)
    keys = range(first_key, positions.stop if causal else rows.n_tokens)
    key, value = rows.between(keys.start, keys.stop)
    n_q, heads = block.shape[:2]
    grouped = block.float().view(n_q, key.shape[1], heads // key.shape[1], -1)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key.float()) * scale
    scores = torch.tanh_(scores.div_(soft_cap)).mul_(soft_cap)
    if causal:
        scores.masked_fill_(~_visible(positions, keys, window_tokens), -torch.inf)
    result = torch.einsum("hgqk,khd->qhgd", scores.softmax(dim=-1), value.float())
    return result.reshape(n_q, heads, -1)


def _visible(queries: range, keys: range, window_tokens: int | None) -> torch.Tensor:
    """Returns a boolean [queries, keys]: which keys each query sees in causal attention."""
    q_pos = torch.arange(queries.start, queries.stop).unsqueeze(1)
    k_pos = torch.arange(keys.start, keys.stop).unsqueeze(0)
    visible = k_pos <= q_pos
    return visible if window_tokens is None else visible & (k_pos >= q_pos - window_tokens)


def register_packed_attention() -> object:
    """Registers a CPU kernel for PyTorch's FlashAttention over packed sequences, which the head of Clef checkpoints calls. It is
    there while the returned object lives."""

    def run(
        query: torch.Tensor,  # [tokens of all sequences, heads, head_dim], as key and value
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
        most_queries: int,
        most_keys: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        scale: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, ...]:
        if dropout or is_causal or any(value is not None for value in others.values()):
            raise NotImplementedError("on a CPU, packed attention has no dropout, no causal mask, and no window")
        output, nothing = torch.empty_like(query), query.new_empty(0)
        starts = zip(itertools.pairwise(query_starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
        for (first, last), (first_key, last_key) in starts:
            own = query[first:last], key[first_key:last_key], value[first_key:last_key]
            q, k, v = (part.transpose(0, 1) for part in own)
            output[first:last] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1)
        return output, nothing, nothing, nothing, nothing

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_forward", run, "CPU")
    return library
