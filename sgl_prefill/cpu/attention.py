"""Attention of one request on a CPU: the arithmetic, free of SGLang.

A request's queries are the last `n_q` of its `n_kv` positions. What the cache already holds (the prefix) is visible to
every query, so it needs no mask; only the suffix is causal:

    keys:      0 .............. n_kv - n_q | n_kv - n_q ............ n_kv
    queries:   every one sees all of these | query i sees up to key n_kv - n_q + i

The two parts run through PyTorch's CPU flash kernel and are merged exactly by their log-sum-exp, so work is
O(suffix x prefix) and no mask or padded query is built. The kernel handles grouped query heads without repeating K, V.
"""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# From this many queries on, K and V are first packed head by head: each is read once per 256 queries, and rows of one
# head that lie side by side make the kernel 10 % faster (12,000 tokens, 4 KV heads of 64), far more than the copy costs.
PACK_FROM_QUERIES = 1024
# Queries per block where a mask or a score matrix must exist. Larger blocks waste work on keys outside the window.
WINDOW_BLOCK_TOKENS = 512
SOFT_CAP_BLOCK_TOKENS = 128


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window_tokens: int | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention output of one request.

    Args:
        query: [n_q, query heads, head_dim], the last n_q positions of the request.
        key, value: [n_kv, kv heads, head_dim], n_kv >= n_q, any strides; kv heads divide query heads.
        scale: factor on the dot products.
        causal: False lets every query see every key.
        window_tokens: a query at position p sees keys p - window_tokens .. p only (SGLang's convention; both ends
            included). None: no window.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 means none.

    Returns:
        [n_q, query heads, head_dim], contiguous, in the dtype of `query`.
    """
    n_q, n_kv = query.shape[0], key.shape[0]
    assert n_q <= n_kv, (n_q, n_kv)
    if window_tokens is not None and (not causal or window_tokens >= n_kv - 1):
        window_tokens = None
    if soft_cap > 0.0:
        return _blockwise_soft_capped(query, key, value, scale, causal, window_tokens, soft_cap)
    if window_tokens is not None:
        return _blockwise_windowed(query, key, value, scale, window_tokens)
    if not causal or n_q == 1:
        return _run_flash(query, key, value, scale)[0]
    n_prefix = n_kv - n_q
    suffix, suffix_lse = _run_flash(query, key[n_prefix:], value[n_prefix:], scale, is_causal=True)
    if n_prefix == 0:
        return suffix
    prefix, prefix_lse = _run_flash(query, key[:n_prefix], value[:n_prefix], scale)
    return merge_by_log_sum_exp(prefix, prefix_lse, suffix, suffix_lse)


def merge_by_log_sum_exp(
    left: torch.Tensor, left_lse: torch.Tensor, right: torch.Tensor, right_lse: torch.Tensor
) -> torch.Tensor:
    """Softmax attention over the union of two disjoint key sets, from the results over each.

    left, right: [n_q, heads, head_dim]; *_lse: [n_q, heads], natural logarithm of the softmax denominators.
    The right side's share of the denominator is exp(r) / (exp(l) + exp(r)) = sigmoid(r - l), which cannot overflow.
    """
    right_share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1)
    return torch.lerp(left.float(), right.float(), right_share).to(left.dtype)


def _run_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [n_q, heads, head_dim], log-sum-exp [n_q, heads]) of the flash kernel, which wants [1, heads, n, dim]."""
    key, value = key.transpose(0, 1), value.transpose(0, 1)
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


def _visible(first_query: int, last_query: int, first_key: int, window_tokens: int | None) -> torch.Tensor:
    """Boolean [queries, keys]: which keys of [first_key, last_query] each query of [first_query, last_query] sees."""
    q_pos = torch.arange(first_query, last_query + 1).unsqueeze(1)
    k_pos = torch.arange(first_key, last_query + 1).unsqueeze(0)
    visible = k_pos <= q_pos
    return visible if window_tokens is None else visible & (k_pos >= q_pos - window_tokens)


def _blockwise_windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window_tokens: int
) -> torch.Tensor:
    """Sliding window: each query block sees its own keys and one window before them, so work is O(n_q x window)."""
    output = torch.empty_like(query)
    n_q, offset = query.shape[0], key.shape[0] - query.shape[0]
    for start in range(0, n_q, WINDOW_BLOCK_TOKENS):
        end = min(start + WINDOW_BLOCK_TOKENS, n_q)
        first_key, last_query = max(0, offset + start - window_tokens), offset + end - 1
        visible = _visible(offset + start, last_query, first_key, window_tokens)
        mask = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -torch.inf)
        keys = slice(first_key, last_query + 1)
        output[start:end] = _run_flash(query[start:end], key[keys], value[keys], scale, mask=mask)[0]
    return output


def _blockwise_soft_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    soft_cap: float,
) -> torch.Tensor:
    """Soft-capped scores, which the flash kernel lacks: float32 score matrices, one query block at a time."""
    output = torch.empty_like(query)
    n_q, n_kv, heads = query.shape[0], key.shape[0], query.shape[1]
    kv_heads, offset = key.shape[1], n_kv - n_q
    for start in range(0, n_q, SOFT_CAP_BLOCK_TOKENS):
        end = min(start + SOFT_CAP_BLOCK_TOKENS, n_q)
        first_key = 0 if window_tokens is None else max(0, offset + start - window_tokens)
        last_key = offset + end - 1 if causal else n_kv - 1
        keys = slice(first_key, last_key + 1)
        grouped = query[start:end].float().view(end - start, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key[keys].float()) * scale
        scores = torch.tanh_(scores.div_(soft_cap)).mul_(soft_cap)
        if causal:
            visible = _visible(offset + start, last_key, first_key, window_tokens)
            scores.masked_fill_(~visible, -torch.inf)
        block = torch.einsum("hgqk,khd->qhgd", scores.softmax(dim=-1), value[keys].float())
        output[start:end] = block.reshape(end - start, heads, -1).to(output.dtype)
    return output
