"""The two parts of a step as the index arrays that each attention kernel takes.

Plans read the table of KV slots on its device without waiting for it: all sizes come from numbers on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_prefill.gpu.two_parts import Part, TwoParts


class SlotTable(NamedTuple):
    """SGLang's table of KV slots, and the row of each request of the step in it."""

    slots: torch.Tensor  # int32 [rows, positions]
    rows: torch.Tensor  # int64 [requests], on the same device


class PagedRows(NamedTuple):
    """Arguments of flashinfer's paged prefill, whose pages are single slots."""

    qo_indptr: torch.Tensor  # int32 [rows + 1], on the host, where the kernel is planned
    kv_indptr: torch.Tensor  # int32 [rows + 1], on the host
    kv_indices: torch.Tensor  # int32 [positions that are read]
    last_page_tokens: torch.Tensor  # int32 [rows], on the host: 1, what an empty row has does not count


class FlashInferPlan(NamedTuple):
    shared: PagedRows  # not causal
    own: PagedRows  # causal


class PageTable(NamedTuple):
    """Arguments of FlashAttention 3 over a paged KV cache."""

    cu_seqlens_q: torch.Tensor  # int32 [rows + 1]
    cache_seqlens: torch.Tensor  # int32 [rows]: positions that are read
    page_table: torch.Tensor  # int32 [rows, pages of the longest]
    most_queries: int  # of a row


class FlashAttentionPlan(NamedTuple):
    shared: PageTable  # not causal
    own: PageTable  # causal


class ExtendRows(NamedTuple):
    """Arguments of SGLang's Triton kernel, which takes K and V of new tokens separately."""

    qo_indptr: torch.Tensor  # int64 [rows + 1]
    kv_indptr: torch.Tensor  # int32 [rows + 1]
    kv_indices: torch.Tensor  # int64 [positions that are read]
    most_queries: int  # of a row


class TritonPlan(NamedTuple):
    shared: ExtendRows  # its new tokens are skipped
    own: ExtendRows  # cached positions alone: its new tokens are handed over
    unshared: (
        torch.Tensor | None
    )  # int64: among the queries of the shared part those that read nothing, which it makes NaN


def last_slots(table: SlotTable, most_cached_tokens: int, piece: int) -> NDArray[np.int32]:
    """Reads the slot at the end of each piece of each request, [requests, pieces]. Waits for the device, alone of all here."""
    positions = piece * torch.arange(most_cached_tokens // piece, device=table.rows.device) + piece - 1
    found: NDArray[np.int32] = table.slots[table.rows[:, None], positions[None, :]].cpu().numpy()
    return found


def flashinfer_plan(table: SlotTable, parts: TwoParts) -> FlashInferPlan:
    return FlashInferPlan(_paged_rows(table, parts.shared), _paged_rows(table, parts.own))


def flash_attention_plan(table: SlotTable, parts: TwoParts, page_tokens: int) -> FlashAttentionPlan:
    """Makes page tables; both parts begin at whole pages (`two_parts.piece_tokens`)."""
    return FlashAttentionPlan(_page_table(table, parts.shared, page_tokens), _page_table(table, parts.own, page_tokens))


def triton_plan(table: SlotTable, parts: TwoParts) -> TritonPlan:
    own = parts.own
    cached = [n_kv - n_new for n_kv, n_new in zip(own.kv_tokens, own.query_tokens, strict=True)]
    starts = np.cumsum([0, *parts.shared.query_tokens])
    unshared = [np.arange(starts[row], starts[row + 1]) for row, n_kv in enumerate(parts.shared.kv_tokens) if n_kv == 0]
    return TritonPlan(
        _extend_rows(table, parts.shared),
        _extend_rows(table, own._replace(kv_tokens=cached)),
        torch.from_numpy(np.concatenate(unshared)).to(table.rows.device) if unshared else None,
    )


def _paged_rows(table: SlotTable, part: Part) -> PagedRows:
    return PagedRows(
        _ends(part.query_tokens, torch.int32),
        _ends(part.kv_tokens, torch.int32),
        _slots(table, part).to(torch.int32),
        torch.ones(len(part.requests), dtype=torch.int32),
    )


def _extend_rows(table: SlotTable, part: Part) -> ExtendRows:
    device = table.rows.device
    return ExtendRows(
        _ends(part.query_tokens, torch.int64).to(device),
        _ends(part.kv_tokens, torch.int32).to(device),
        _slots(table, part).to(torch.int64),
        max(part.query_tokens),
    )


def _page_table(table: SlotTable, part: Part, page_tokens: int) -> PageTable:
    device = table.rows.device
    n_pages = max(-(-max(part.kv_tokens) // page_tokens), 1)
    first = _on(device, part.first_positions)
    positions = first[:, None] + page_tokens * torch.arange(n_pages, device=device)[None, :]
    # Behind a row's own pages stands what is not read, but must be in the table.
    positions = positions.clamp(max=table.slots.shape[1] - 1)
    slots = table.slots[table.rows[_on(device, part.requests)][:, None], positions]
    return PageTable(
        _ends(part.query_tokens, torch.int32).to(device),
        _on(device, part.kv_tokens).to(torch.int32),
        (slots // page_tokens).to(torch.int32),
        max(part.query_tokens),
    )


def _slots(table: SlotTable, part: Part) -> torch.Tensor:
    """Returns the slots of all positions that a part reads, row after row."""
    device = table.rows.device
    n_kv = sum(part.kv_tokens)
    starts = _ends(part.kv_tokens, torch.int64)[:-1].to(device)
    row = torch.repeat_interleave(
        torch.arange(len(part.requests), device=device), _on(device, part.kv_tokens), output_size=n_kv
    )
    positions = torch.arange(n_kv, device=device) + (_on(device, part.first_positions) - starts)[row]
    return table.slots[table.rows[_on(device, part.requests)][row], positions]


def _ends(tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns where each row begins and the last one ends, on the host."""
    return torch.from_numpy(np.cumsum([0, *tokens])).to(dtype)


def _on(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)
