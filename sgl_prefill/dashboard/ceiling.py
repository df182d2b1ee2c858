"""What a prefix cache without a limit would have held of each prompt, the ceiling of its hit share; counted while one looks."""

from __future__ import annotations

from array import array

import numpy as np

BLOCK_TOKENS = 64
MOST_BLOCKS = 500_000  # that are remembered; then all are forgotten, and prompts count as new again

_WEIGHTS = np.random.default_rng(0).integers(1, 2**63, BLOCK_TOKENS, dtype=np.uint64) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Ceiling:
    """Remembers the prompts that it has seen by hashes of their prefixes, in whole blocks."""

    def __init__(self) -> None:
        self.n_input_tokens = self.n_cached_tokens = self.n_most_tokens = 0  # of the same prompts
        self._seen: set[int] = set()

    def add(self, tokens: array[int], namespace: str | None, n_cached_tokens: int) -> None:
        """Counts a prompt that has run. n_cached_tokens: what the engine's cache held of it."""
        hashes = _prefix_hashes(tokens, namespace)
        low, high = 0, len(hashes)
        while low < high:  # whoever has seen a prefix has seen all before it
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in self._seen else (low, middle)
        if len(self._seen) + len(hashes) > MOST_BLOCKS:
            self._seen.clear()
        self._seen.update(hashes[low:])
        self.n_input_tokens += len(tokens)
        self.n_cached_tokens += n_cached_tokens
        self.n_most_tokens += max(n_cached_tokens, low * BLOCK_TOKENS)

    @property
    def share(self) -> float | None:
        """Returns the ceiling; None where no prompt has run while somebody looked."""
        return self.n_most_tokens / self.n_input_tokens if self.n_input_tokens else None

    @property
    def hit_share(self) -> float | None:
        """Returns what the engine's cache held of the same prompts."""
        return self.n_cached_tokens / self.n_input_tokens if self.n_input_tokens else None


def _prefix_hashes(tokens: array[int], namespace: str | None) -> list[int]:
    """Hashes the prompt's beginning up to the end of each whole block; products and sums of 64 bits, which may overflow."""
    n_blocks = (len(tokens) - 1) // BLOCK_TOKENS  # the last token is always computed
    if n_blocks < 1:
        return []
    ids = np.frombuffer(tokens, tokens.typecode)[: n_blocks * BLOCK_TOKENS].astype(np.uint64)
    with np.errstate(over="ignore"):
        of_block = (ids.reshape(n_blocks, BLOCK_TOKENS) + np.uint64(1)) @ _WEIGHTS
        of_block = (of_block ^ (of_block >> np.uint64(29))) * _MIX
        places = np.arange(1, n_blocks + 1, dtype=np.uint64) * _MIX | np.uint64(1)
        found = np.cumsum(of_block * places) + np.uint64(hash(namespace) & (2**63 - 1))
    hashes: list[int] = found.tolist()
    return hashes
