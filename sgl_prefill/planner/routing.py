"""Routers before several simulated engines: by user, and the gateway's policies with the gateway's defaults (`smg` 1.13.0).

All engines are healthy, and a router knows at every moment how many requests each has not answered. Left out of every policy:
the engines' own reports of queued tokens, polled every 10 s, by which the gateway compares loads where they are fresh
(`power_of_two`, and the least loaded of `cache_aware`); and its overload protection, which this package turns off.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_prefill.planner.workloads import Arrival


class EngineLoad(Protocol):
    """What a router knows of an engine."""

    @property
    def n_unanswered(self) -> int:
        """Returns how many requests it has not answered."""

    @property
    def n_users(self) -> int:
        """Returns of how many users these are."""


class Router(Protocol):
    """Sends each request to one engine."""

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        """Returns the index of the engine that gets this request, and counts with it from now on."""


class ByUser:
    """All requests of a user to one engine: `--policy manual --assignment-mode min_group`, with the user's name as the key.

    A new user goes to the engine with unanswered requests of the fewest users. As in the gateway, who waits for nothing now does
    not count, and chance decides among equals. Left out: a user of whom nothing comes for four hours is forgotten.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._engine_of: dict[str, int] = {}

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        if (index := self._engine_of.get(arrival.of_user)) is None:
            n_users = [engine.n_users for engine in engines]
            fewest = min(n_users)
            index = self._rng.choice([index for index, n in enumerate(n_users) if n == fewest])
            self._engine_of[arrival.of_user] = index
        return index


class CacheAware:
    """The engine to which the longest prefix of this prompt has been sent, unless it is overloaded: `--policy cache_aware`.

    Where the match is at most `threshold` of the prompt, the least loaded engine gets it. So it does where the matched one is
    above the mean of all by `spill_factor` and by a margin of requests: two standard deviations of a count with that mean, within
    `spill_margins`. Of several engines with the longest match the least loaded is the matched one. The gateway remembers what it
    has sent, and does not know what an engine has evicted. Left out: it forgets too, above 67,108,864 characters of all engines'
    prompts (some 1,200 profiles of 14,000 tokens), and it warms an engine that knows less than the others with every eighth hit.
    """

    def __init__(
        self, *, threshold: float = 0.3, spill_factor: float = 1.5, spill_margins: tuple[float, float] = (4.0, 64.0)
    ) -> None:
        self._threshold = threshold
        self._spill_factor = spill_factor
        self._least_margin, self._most_margin = spill_margins
        self._sent_tokens: dict[str, dict[int, int]] = {}  # of each prefix: the longest that each engine has been sent

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        sent = self._sent_tokens.setdefault(arrival.prefix_id, {})
        matches = {index: min(n, arrival.prefix_tokens) for index, n in sent.items()}
        longest = max(matches.values(), default=0)
        if longest > self._threshold * arrival.n_tokens:
            holders = [index for index, n in matches.items() if n == longest]
            index = min(holders, key=lambda holder: engines[holder].n_unanswered)
            if self._is_overloaded(engines[index].n_unanswered, engines):
                index = least_loaded(engines)
        else:
            index = least_loaded(engines)
        sent[index] = max(sent.get(index, 0), arrival.prefix_tokens)
        return index

    def _is_overloaded(self, n_unanswered: int, engines: Sequence[EngineLoad]) -> bool:
        mean = sum(engine.n_unanswered for engine in engines) / len(engines)
        margin = min(max(2 * math.sqrt(mean), self._least_margin), self._most_margin)
        return n_unanswered > mean + margin and n_unanswered > self._spill_factor * mean


class PrefixHash:
    """The engine at the place of the prompt's first tokens on a ring of hashes, unless it is overloaded: `--policy prefix_hash`.

    One that is above the mean by `load_factor` and by `margin` requests is passed over for the least loaded. A prefix shorter
    than `n_tokens` is hashed with the tokens behind it, which are each prompt's own. The hash function is not the gateway's:
    which engine a prefix meets differs, how evenly they are spread does not.
    """

    PLACES_AN_ENGINE = 150

    def __init__(self, *, n_tokens: int = 256, load_factor: float = 1.25, margin: int = 10) -> None:
        self._n_tokens = n_tokens
        self._load_factor = load_factor
        self._margin = margin
        self._numbers = itertools.count()
        self._ring: list[tuple[int, int]] = []  # sorted places, each with its engine
        self._n_engines = 0

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        if self._n_engines != len(engines):
            self._n_engines = len(engines)
            places = itertools.product(range(len(engines)), range(self.PLACES_AN_ENGINE))
            self._ring = sorted((_hash(f"engine {index}, place {place}"), index) for index, place in places)
        own = "" if arrival.prefix_tokens >= self._n_tokens else f", then tail {next(self._numbers)}"
        place = bisect.bisect_left(self._ring, (_hash(arrival.prefix_id + own), -1)) % len(self._ring)
        index = self._ring[place][1]
        mean = (sum(engine.n_unanswered for engine in engines) + 1) / len(engines)
        limit = max(mean * self._load_factor, mean + self._margin)
        return index if engines[index].n_unanswered <= limit else least_loaded(engines)


class PowerOfTwo:
    """The less loaded of two engines that chance picks: `--policy power_of_two`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        if len(engines) == 1:
            return 0
        return min(self._rng.sample(range(len(engines)), 2), key=lambda index: engines[index].n_unanswered)


class RoundRobin:
    """One engine after the other: `--policy round_robin`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def engine_of(self, arrival: Arrival, engines: Sequence[EngineLoad]) -> int:
        return next(self._numbers) % len(engines)


# By the names that `python -m sgl_prefill.cluster --routing` gives them; each starts with no memory.
ROUTERS: dict[str, Callable[[random.Random], Router]] = {
    "user": ByUser,
    "cache_aware": lambda rng: CacheAware(),
    "prefix_hash": lambda rng: PrefixHash(),
    "power_of_two": PowerOfTwo,
    "round_robin": lambda rng: RoundRobin(),
}


def least_loaded(engines: Sequence[EngineLoad]) -> int:
    return min(range(len(engines)), key=lambda index: engines[index].n_unanswered)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
