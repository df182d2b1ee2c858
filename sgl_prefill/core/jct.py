"""Job completion time (JCT) models: what a prefill-only request costs, known before it runs (PrefillOnly, section 6.3)."""

from __future__ import annotations

from typing import Protocol


class JctModel(Protocol):
    """Predicted cost of one request, in any unit in which smaller means sooner done."""

    def __call__(self, n_input_tokens: int, n_cached_tokens: int) -> float:
        """Cost of a prompt of `n_input_tokens`, `n_cached_tokens` of which the prefix cache holds. Must be pure."""
        ...


def cache_miss_tokens(n_input_tokens: int, n_cached_tokens: int) -> float:
    """The paper's default proxy, in tokens: what the prefix cache does not hold (Pearson 0.987 with the true JCT there)."""
    assert 0 <= n_cached_tokens <= n_input_tokens, (n_cached_tokens, n_input_tokens)
    return float(n_input_tokens - n_cached_tokens)
