"""Requests begin a few at a time, clients in turn: thousands that one client sends at once do not hold up the others.

From its turn to the scheduler process a request runs without waiting: parsing, checks and sending take the event loop some
0.5 ms. In order of arrival, another client's request would wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

AT_ONCE = 4  # requests that begin in one turn of the event loop


class FairTurns:
    """Call it in one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next one first
        self._n_begun = 0  # in this turn of the event loop

    async def mine(self, client: int) -> None:
        """Returns when a request of this client may begin. client: as `Caller.turn_of` names it."""
        if not self._waiting and self._n_begun < AT_ONCE:
            self._count(1)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _count(self, n: int) -> None:
        if self._n_begun == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._n_begun += n

    def _next_turn(self) -> None:
        n_begun = self._n_begun = 0
        while self._waiting and n_begun < AT_ONCE:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the other clients
            if not turn.cancelled():
                turn.set_result(None)
                n_begun += 1
        if n_begun:
            self._count(n_begun)
