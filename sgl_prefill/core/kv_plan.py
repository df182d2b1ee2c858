"""Which KV of a request is kept, decided before it runs (suffix-KV discarding: PrefillOnly, section 5).

    tokens of a request:   [0, c)          [c, s)               [s, d)             [d, n)
    KV slots:              reused          reused               durable            scratch
    owner while it runs:   prefix cache,   its leader           the request        the request; memory shared by all layers
                           locked
    afterwards:            prefix cache    as of its leader     prefix cache       none: overwritten by the next request

`c` is what the prefix cache holds, `n` the length of the input, and `d` is chosen here: as much prefix as fits after
evicting what is colder. A tail of less than a page is durable only where the whole request is.

A follower is a request whose tokens up to `s` another request of the same step computes, its leader (`packing`); of all others
`s` is `c`. Where the leader keeps fewer than `s` tokens, `d` is what the leader keeps, and all of the follower's own is scratch:
the cache holds no prefix with a gap.
"""

from __future__ import annotations

from typing import NamedTuple


class KVPlan(NamedTuple):
    """0 <= n_cached <= n_durable <= n_input and 0 <= n_led < n_input, all in tokens."""

    n_input: int
    n_cached: int  # c: reused from the prefix cache; whole pages
    n_durable: int  # d: in the prefix cache afterwards; whole pages, or all of the input
    n_led: int = 0  # s of a follower, whole pages; 0 without a leader

    @property
    def n_reused(self) -> int:
        """Counts the tokens that the step does not compute for this request."""
        return max(self.n_cached, self.n_led)

    @property
    def n_new_durable(self) -> int:
        """Counts the durable slots to allocate."""
        return max(self.n_durable - self.n_reused, 0)

    @property
    def n_scratch(self) -> int:
        """Counts the tokens to compute whose KV lives for one layer only."""
        return self.n_input - max(self.n_durable, self.n_reused)


def plan_kv(
    n_input: int,
    n_cached: int,
    n_available: int,
    page_size: int = 1,
    *,
    all_durable: bool = False,
    leader: KVPlan | None = None,
    n_led: int = 0,
) -> KVPlan:
    """Keep as much of the prefix as `n_available` durable slots, free or evictable, can take on top of what is cached.

    Args:
        n_input: tokens of the request, at least 1.
        n_cached: tokens of it that the prefix cache holds and that are locked, a multiple of `page_size`.
        n_available: durable slots, a multiple of `page_size`; the request's own cached ones are not among them.
        all_durable: the request decodes after its prefill and needs all of its KV. Raises ValueError where that does
            not fit.
        leader: computes the first `n_led` tokens.
    """
    assert 0 <= n_cached <= n_input, (n_cached, n_input)
    if leader is not None and leader.n_durable < n_led:
        return KVPlan(n_input, n_cached, max(leader.n_durable, n_cached), n_led)
    n_reused = max(n_cached, n_led)
    n_missing = n_input - n_reused
    if ceil_to(n_missing, page_size) <= n_available:
        return KVPlan(n_input, n_cached, n_input, n_led)
    if all_durable:
        raise ValueError(f"{n_missing} tokens need durable slots, and {n_available} are free or can be evicted")
    return KVPlan(n_input, n_cached, n_reused + floor_to(n_available, page_size), n_led)


def available_beside_wanted(n_cached: int, n_shared: int, n_available: int, n_wanted: int) -> int:
    """Counts the durable slots for a request, where `n_wanted` of the `n_available` hold prefixes that waiting requests will use.

    The first `n_shared` tokens of the request are waited for too, by requests that share them: for those any slot is right.
    A tail without sharers takes only slots that no waiting job needs. (PrefillOnly keeps a prefix of any
    request.)
    """
    return max(n_available - n_wanted, min(n_available, n_shared - n_cached), 0)


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def floor_to(n: int, multiple: int) -> int:
    return n // multiple * multiple
