"""Threads for long texts: clients take turns by characters (start-time fair queueing), and one thread is for short texts."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

LONG_CHARACTERS = 100_000  # some 60 ms of a thread
FEW_CLIENTS = 1000
T = TypeVar("T")


class _Waiting(NamedTuple):
    start: float  # virtual time, in characters
    number: int  # of equal ones the first
    n_characters: int
    turn: asyncio.Future[None]


class FairThreads:
    """Call it in one event loop."""

    def __init__(self, n_threads: int, name: str) -> None:
        self.n_threads = n_threads
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._waiting: tuple[list[_Waiting], list[_Waiting]] = ([], [])  # heaps of short and of long texts
        self._numbers = itertools.count()
        self._now = 0.0  # virtual time: where the text that began last started
        self._ends: dict[int, float] = {}  # of clients: where their next text may start
        self._most_ends = FEW_CLIENTS
        self._n_running = self._n_long = 0

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting))

    async def run(self, client: int, n_characters: int, work: Callable[[], T]) -> T:
        """Runs `work` in a thread when it is the client's turn. client: as `Caller.turn_of` names it."""
        loop = asyncio.get_running_loop()
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + n_characters
        if len(self._ends) >= self._most_ends:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
            self._most_ends = 2 * len(self._ends) + FEW_CLIENTS
        is_long = n_characters >= LONG_CHARACTERS
        one = _Waiting(start, next(self._numbers), n_characters, loop.create_future())
        heapq.heappush(self._waiting[is_long], one)
        self._begin()
        try:
            await one.turn
        except asyncio.CancelledError:
            if one.turn.done() and not one.turn.cancelled():
                self._end(is_long)  # its turn had come
            raise
        running = loop.run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: self._end(is_long))  # also if its client has left
        return await asyncio.shield(running)

    def _begin(self) -> None:
        """Gives free threads to the texts whose turn it is."""
        while self._n_running < self.n_threads:
            one = self._next()
            if one is None:
                break
            self._now = max(self._now, one.start)
            self._n_running += 1
            self._n_long += one.n_characters >= LONG_CHARACTERS
            one.turn.set_result(None)
        if not self._n_running:  # and nothing waits
            self._ends = {}

    def _next(self) -> _Waiting | None:
        for heap in self._waiting:
            while heap and heap[0].turn.cancelled():
                heapq.heappop(heap)
        may_be_long = self._n_long < max(self.n_threads - 1, 1)
        heaps = [heap for heap, allowed in zip(self._waiting, (True, may_be_long), strict=True) if heap and allowed]
        return heapq.heappop(min(heaps, key=lambda heap: heap[0])) if heaps else None

    def _end(self, is_long: bool) -> None:
        self._n_running -= 1
        self._n_long -= is_long
        self._begin()
