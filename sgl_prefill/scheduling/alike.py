"""Which earlier prompt began like this one, and how far, without keeping either: hashes of their beginnings.

With this a log of decisions can be replayed in another order: who would have found whose prefix. The hashes stay in this
process; what is told is the number of another job and a number of tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import NamedTuple

LEAST_TOKENS = 16
PARTS_OF_A_DOUBLING = 16  # beginnings are compared so often between n and 2 n tokens: a length is known to a sixteenth
KEPT_BEGINNINGS = 100_000  # some 12 MB


class Beginning(NamedTuple):
    """What two prompts have in common."""

    job: int  # the number of the earlier one
    n_tokens: int  # at least


class Alike:
    """The beginnings of recent prompts; those that were not seen for longest are forgotten first."""

    def __init__(self) -> None:
        self._job_of: dict[bytes, int] = {}

    def find_and_keep(self, tokens: array[int], namespace: str | None, job: int) -> Beginning | None:
        """Returns the longest beginning that an earlier prompt of the same namespace had, and keeps this one's."""
        digest = hashlib.blake2b((namespace or "").encode("utf-8", "surrogatepass"), digest_size=12)
        content = memoryview(tokens).cast("B")
        found, start = None, 0
        for end in _ends(len(tokens)):
            digest.update(content[start * tokens.itemsize : end * tokens.itemsize])
            start, key = end, digest.digest()
            earlier = self._job_of.pop(key, None)
            if earlier is not None:
                found = Beginning(earlier, end)
            self._job_of[key] = job if earlier is None else earlier
        while len(self._job_of) > KEPT_BEGINNINGS:
            del self._job_of[next(iter(self._job_of))]
        return found


def _ends(n_tokens: int) -> Iterator[int]:
    """Yields the lengths at which a prompt of so many tokens is compared."""
    end = LEAST_TOKENS
    while end <= n_tokens:
        yield end
        end += max(LEAST_TOKENS, (1 << (end.bit_length() - 1)) // PARTS_OF_A_DOUBLING)
