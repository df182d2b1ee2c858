"""What a far larger prefix cache would have held of each prompt: the ceiling of the hit share, for `/metrics` and the dashboard.

It remembers the prompts that it has seen by hashes of their beginnings, in whole blocks. Of bounded memory are two generations:
once the newer one is full it becomes the older one, and what nobody has asked for in both is forgotten.
"""

from __future__ import annotations

from array import array

import numpy as np

BLOCK_TOKENS = 64
GENERATION_BLOCKS = 150_000  # so 10 to 20 million tokens are remembered, in some 20 MB

_WEIGHTS = np.random.default_rng(0).integers(1, 2**63, BLOCK_TOKENS, dtype=np.uint64) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Ceiling:
    """One a scheduler process; it costs some 10 us a request of 1,000 tokens."""

    def __init__(self, generation_blocks: int = GENERATION_BLOCKS) -> None:
        self.n_input_tokens = self.n_cached_tokens = self.n_reusable_tokens = 0  # of the same prompts
        self._generation_blocks = generation_blocks
        # Whoever is in one of them has all its beginnings there, since the whole path of a prompt is written at once.
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def add(self, tokens: array[int], namespace: str | None, n_cached_tokens: int, most_cached_tokens: int) -> int:
        """Counts a prompt that has run.

        Args:
            n_cached_tokens: what the engine's cache held of it.
            most_cached_tokens: what of it may come from a cache at all.

        Returns:
            What the larger cache would have held of it; no less than the engine's.
        """
        hashes = _prefix_hashes(tokens, namespace)
        n_seen_tokens = self._count_seen(hashes) * BLOCK_TOKENS
        if len(self._newer) + len(hashes) > self._generation_blocks:
            self._older, self._newer = self._newer, set()
        self._newer.update(hashes)
        n_reusable_tokens = max(n_cached_tokens, min(n_seen_tokens, most_cached_tokens))
        self.n_input_tokens += len(tokens)
        self.n_cached_tokens += n_cached_tokens
        self.n_reusable_tokens += n_reusable_tokens
        return n_reusable_tokens

    @property
    def share(self) -> float | None:
        """Returns the ceiling since the start; None where no prompt has run."""
        return self.n_reusable_tokens / self.n_input_tokens if self.n_input_tokens else None

    @property
    def hit_share(self) -> float | None:
        """Returns what the engine's cache held of the same prompts."""
        return self.n_cached_tokens / self.n_input_tokens if self.n_input_tokens else None

    def _count_seen(self, hashes: list[int]) -> int:
        """Counts the first blocks that were seen before, by halving: whoever has seen a beginning has seen all shorter ones."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            seen = hashes[middle] in self._newer or hashes[middle] in self._older
            low, high = (middle + 1, high) if seen else (low, middle)
        return low


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
