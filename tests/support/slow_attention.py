"""Attention kernels of GPUs as loops over rows: they take the same arguments, and mean the same by them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool, soft_cap: float = 0.0
) -> Outputs:
    """Returns [queries, heads, dim] and the natural log-sum-exp [queries, heads]. causal: the last query sees all keys, the one
    before it all but one; without keys 0/0 and the logarithm of 0. query: [queries, heads, dim], others: [keys, KV heads, dim].
    """
    n_queries, n_keys = len(query), len(key)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if causal:
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1) if n_keys else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.exp(scores - lse[..., None])
    output = torch.einsum("hqk,khd->qhd", weights, value) if n_keys else torch.full_like(query, math.nan)
    return output, lse.T.contiguous()


def merge(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, base: float) -> None:
    """Merges in place; logarithms are to this base. What weighs nothing must still be a number, as in the kernels."""
    top = torch.maximum(lse, other_lse)
    weight, other_weight = (torch.pow(base, x - top)[..., None] for x in (lse, other_lse))
    output.copy_((output * weight + other * other_weight) / (weight + other_weight))


class FlashInferPaged:
    """`BatchPrefillWithPagedKVCacheWrapper`, of what is called of it."""

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_tokens: torch.Tensor,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert page_size == 1
        arrays = (qo_indptr, kv_indptr, kv_indices, last_page_tokens)
        assert {array.dtype for array in arrays} == {torch.int32}
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_tokens) + 1
        assert len(kv_indices) == kv_indptr[-1]
        assert bool((last_page_tokens == 1).all())
        self._queries, self._kv, self._slots = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices.long()

    def forward_return_lse(self, query: torch.Tensor, pool: Outputs, *, causal: bool, sm_scale: float) -> Outputs:
        """The log-sum-exp is of base 2; rows without keys give 0 and what flashinfer calls minus infinity."""
        assert len(query) == self._queries[-1]
        found = []
        for row in range(len(self._queries) - 1):
            slots = self._slots[self._kv[row] : self._kv[row + 1]]
            rows = query[self._queries[row] : self._queries[row + 1]]
            output, lse = attend(rows, pool[0][slots], pool[1][slots], sm_scale, causal=causal)
            found.append((output, lse / math.log(2)) if len(slots) else (0 * rows, torch.full_like(lse, -5e4)))
        return torch.cat([output for output, _ in found]), torch.cat([lse for _, lse in found])


def flashinfer_merge_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    merge(v, s, v_other, s_other, base=2)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    num_splits: int,
    return_softmax_lse: bool,
    out: torch.Tensor | None,
) -> Outputs:
    """FlashAttention 3 over pages, [pages, tokens of a page, KV heads, dim]. The log-sum-exp is [heads, queries]."""
    assert {array.dtype for array in (page_table, cache_seqlens, cu_seqlens_q)} == {torch.int32}
    assert return_softmax_lse
    starts = cu_seqlens_q.tolist()
    assert starts[-1] == len(q)
    assert len(starts) == len(cache_seqlens) + 1 == len(page_table) + 1
    assert max_seqlen_q == max(end - start for start, end in itertools.pairwise(starts))
    out = torch.empty_like(q) if out is None else out
    all_lse = torch.empty(q.shape[:2])
    for row, n_kv in enumerate(cache_seqlens.tolist()):
        pages = page_table[row, : -(-n_kv // k_cache.shape[1])].long()
        queries = slice(starts[row], starts[row + 1])
        key, value = (cache[pages].flatten(0, 1)[:n_kv] for cache in (k_cache, v_cache))
        output, all_lse[queries] = attend(q[queries], key, value, softmax_scale, causal=causal, soft_cap=softcap)
        out[queries] = output if n_kv else 0
    return out, all_lse.T


def merge_state(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """SGLang's merges, of natural logarithms."""
    assert output.data_ptr() == suffix_output.data_ptr()
    merge(output, suffix_lse, prefix_output, prefix_lse, base=math.e)


def extend_attention_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: None,
    is_causal: bool,
    mask_indptr: None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float,
    logit_cap: float,
    lse_extend: torch.Tensor,
    skip_extend: bool,
    page_size: int,
) -> None:
    """SGLang's Triton kernel: cached positions from the pool, new ones from `key` and `value`; rows without any give NaN."""
    assert kv_indices.dtype == torch.int64
    starts, kv = qo_indptr.tolist(), kv_indptr.tolist()
    assert max_len_extend == max(end - start for start, end in itertools.pairwise(starts))
    for row in range(len(starts) - 1):
        queries = slice(starts[row], starts[row + 1])
        slots = kv_indices[kv[row] : kv[row + 1]]
        pools = ((key_pool, key), (value_pool, value))
        keys, values = (pool[slots] if skip_extend else torch.cat((pool[slots], new[queries])) for pool, new in pools)
        output[queries], lse_extend[queries] = attend(
            query[queries], keys, values, sm_scale, causal=is_causal, soft_cap=logit_cap
        )
