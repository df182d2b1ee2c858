"""Clients take turns at the event loop, which one client's thousand bodies would otherwise fill for all others.

To parse, check and tokenise a body takes a millisecond to a second, in which the HTTP process does nothing else. One at a time
is let in, and of those that wait, the next is another client's.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A loop that is busy with who has the turn runs no timer: when this one runs, the turn's holder waits for something itself.
LONGEST_WAIT_S = 0.02


class Turns:
    """Lets one in at a time: clients in a circle, each client's own in the order in which they came. Of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, who is next at the front; none is empty
        self._is_taken = False

    async def take(self, client: str) -> Turn:
        """Waits for this client's turn. Who is cancelled meanwhile has taken none."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            called = loop.create_future()
            self._waiting.setdefault(client, deque()).append(called)
            try:
                await called
            except asyncio.CancelledError:
                if not called.cancelled():  # called and cancelled at once: the turn is another's
                    self._call_next()
                raise
        self._is_taken = True
        return Turn(self, loop)

    def _call_next(self) -> None:
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            called = queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # behind all others
            if not called.done():  # else it was cancelled
                called.set_result(None)
                return
        self._is_taken = False


class Turn:
    """One client's turn, until it is ended: before its request waits for another thread or process."""

    def __init__(self, turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        self._turns = turns
        self._has_ended = False
        self._timer = loop.call_later(LONGEST_WAIT_S, self.end)

    def end(self) -> None:
        """Lets the next in; a second call does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._timer.cancel()
            self._turns._call_next()
